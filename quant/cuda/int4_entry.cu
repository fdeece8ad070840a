// Entry points of the int4 kernels: one module an element kind, since a process seldom uses more than one.
// ELEMENT_KIND is given to the compiler (0 bf16, 1 fp16, 2 fp32); launches.py knows the names.

#define RECORD_KERNEL(work, bits)                                                                  \
    extern "C" __global__ void __launch_bounds__(512, 1) work##_##bits(const RecordJob job) {      \
        work<ELEMENT_KIND, bits>(job);                                                             \
    }

RECORD_KERNEL(encode_keys, 4)
RECORD_KERNEL(encode_keys, 5)
RECORD_KERNEL(encode_values, 4)
RECORD_KERNEL(encode_values, 3)
RECORD_KERNEL(decode_keys, 4)
RECORD_KERNEL(decode_keys, 5)
RECORD_KERNEL(decode_values, 4)
RECORD_KERNEL(decode_values, 3)
