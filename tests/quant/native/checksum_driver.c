/* Prints the XXH3-128 of some bytes, of each length of a list and in two pieces, by the plain form. */
#include <stdio.h>
#include <string.h>

#include "checksum.h"

#include "checksum.inc"

static const kv_path only = {.name = "driver", .checksum = &KV_NAME(checksum)};

const kv_path *kv_active(void) { return &only; }

#define LONGEST 5000

int main(void) {
    static const int sizes[] = {0, 1, 3, 4, 8, 9, 16, 17, 64, 65, 128, 129, 240, 241, 256, 257, 1024, 1025, 4096, LONGEST};
    uint8_t bytes[LONGEST], copy[LONGEST], digest[KV_CHECKSUM_BYTES];
    for (int i = 0; i < LONGEST; i++) bytes[i] = (uint8_t)(i * 7 + i / 256);
    for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++) {
        const int first = sizes[size] / 3, rest = sizes[size] - first;
        kv_checksum state;
        kv_checksum_begin(&state);
        memset(copy, 0, sizeof copy);
        kv_checksum_update(&state, bytes, first, copy, 0);
        kv_checksum_update(&state, bytes + first, rest, copy + first, 1);
        kv_checksum_digest(&state, digest);
        if (memcmp(bytes, copy, (size_t)sizes[size])) return 1;
        printf("%d ", sizes[size]);
        for (int i = 0; i < KV_CHECKSUM_BYTES; i++) printf("%02x", digest[i]);
        printf("\n");
    }
    return 0;
}
