// Copies of pages between any two places that the device can address: slab, another device's memory, pinned host memory.

struct CopyJob {
    char* target;
    const i64* target_offsets;  // bytes from `target` to each page; null: page * target_stride
    const char* source;
    const i64* source_offsets;
    i64 target_stride, source_stride;  // bytes
    u32 page_units;                    // 16-byte units of a page
    u32 page_count;
    u32 page_chunks;                   // ceil(page_units / (4 * blockDim.x))
    u32 unused;
};

#define UNITS_A_THREAD 4

// A row of threads (threadIdx.y) copies one chunk of one page; pages never overlap, so order does not matter.
DEVICE void copy_chunk(const CopyJob& job) {
    const u64 index = (u64)blockIdx.x * blockDim.y + threadIdx.y;
    const u64 page = index / job.page_chunks;
    if (page >= job.page_count) return;
    const u32 chunk = (u32)(index - page * job.page_chunks);
    const i64 target_at = job.target_offsets ? job.target_offsets[page] : (i64)page * job.target_stride;
    const i64 source_at = job.source_offsets ? job.source_offsets[page] : (i64)page * job.source_stride;
    const uint4* source = (const uint4*)(job.source + source_at);
    uint4* target = (uint4*)(job.target + target_at);
    const u32 first = chunk * UNITS_A_THREAD * blockDim.x + threadIdx.x;
    uint4 held[UNITS_A_THREAD];
#pragma unroll
    for (u32 i = 0; i < UNITS_A_THREAD; i++)  // all loads before the first store: they travel together
        if (first + i * blockDim.x < job.page_units) held[i] = source[first + i * blockDim.x];
#pragma unroll
    for (u32 i = 0; i < UNITS_A_THREAD; i++)
        if (first + i * blockDim.x < job.page_units) target[first + i * blockDim.x] = held[i];
}

extern "C" __global__ void __launch_bounds__(256) copy_pages(const CopyJob job) { copy_chunk(job); }
