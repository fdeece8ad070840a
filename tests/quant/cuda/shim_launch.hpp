// Put after a kernel module's text; SHIM_JOB is the type of its kernels' argument.

typedef void (*ShimKernel)(const SHIM_JOB);
static ShimKernel shim_kernel;
static const SHIM_JOB* shim_job;

extern "C" size_t shim_job_bytes() { return sizeof(SHIM_JOB); }

static unsigned shim_flush(bool on) {  // subnormals to zero in inputs and results, as -ftz=true does; the old state
#ifdef __SSE2__
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(on ? before | 0x8040u : before & ~0x8040u);
    return before;
#else
    return 0;
#endif
}

// 0, or 1 when a thread block hangs in a barrier.
extern "C" int shim_launch(
    void* kernel, unsigned grid, unsigned x, unsigned y, const void* job, unsigned order, int flush) {
    const unsigned before = shim_flush(flush);
    int hangs = 0;
    shim_kernel = (ShimKernel)kernel;
    shim_job = (const SHIM_JOB*)job;
    shim::body = [] { shim_kernel(*shim_job); };
    gridDim = dim3{grid, 1, 1};
    blockDim = dim3{x, y, 1};
    for (unsigned block = 0; block < grid && !hangs; block++) {
        blockIdx = dim3{order == 1 ? grid - 1 - block : block, 0, 0};
        hangs = !shim::run_block(order);
    }
    shim_flush(before & 0x8040u);
    return hangs;
}
