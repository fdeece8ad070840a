// What comes first in every module. The files of this folder are joined into translation units by source.py, so there
// are no includes, and NVRTC needs no CUDA header. The same text compiles with g++ behind a shim of CUDA's threads,
// which the tests run: keep to the intrinsics that the shim knows, and let no thread leave a kernel before its last
// barrier.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__
#define FULL_WARP 0xffffffffu

#ifdef __CUDACC__
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif
