// Put after a kernel module's text; SHIM_JOB is the type of its kernels' argument.

typedef void (*ShimKernel)(const SHIM_JOB);
static ShimKernel shim_kernel;
static const SHIM_JOB* shim_job;

extern "C" size_t shim_job_bytes() { return sizeof(SHIM_JOB); }

// 0, or 1 when a thread block hangs in a barrier.
extern "C" int shim_launch(void* kernel, unsigned grid, unsigned x, unsigned y, const void* job, unsigned order) {
    shim_kernel = (ShimKernel)kernel;
    shim_job = (const SHIM_JOB*)job;
    shim::body = [] { shim_kernel(*shim_job); };
    gridDim = dim3{grid, 1, 1};
    blockDim = dim3{x, y, 1};
    for (unsigned block = 0; block < grid; block++) {
        blockIdx = dim3{order == 1 ? grid - 1 - block : block, 0, 0};
        if (!shim::run_block(order)) return 1;
    }
    return 0;
}
