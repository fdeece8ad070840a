/* Prints, for every way to compute SHA-256 that runs here and some block sizes, the last hash of a chain. */
#include <stdio.h>

#include "hash.h"

#define BLOCKS 10
#define LONGEST 37

int main(void) {
    static const int64_t sizes[] = {1, 3, 4, 16, LONGEST};
    uint32_t tokens[BLOCKS * LONGEST];
    uint8_t parent[KV_HASH_BYTES], hashes[BLOCKS * KV_HASH_BYTES];
    for (uint32_t i = 0; i < BLOCKS * LONGEST; i++) tokens[i] = i * 2654435761u;
    for (int i = 0; i < KV_HASH_BYTES; i++) parent[i] = (uint8_t)i;
    for (const kv_sha_way *way = kv_sha_ways; way->name; way++) {
        if (!kv_sha_way_runs_here(way)) continue;
        for (size_t size = 0; size < sizeof sizes / sizeof *sizes; size++) {
            if (kv_hash_chain(way, parent, tokens, BLOCKS, sizes[size], hashes)) return 1;
            printf("%s %d ", way->name, (int)sizes[size]);
            for (int i = 0; i < KV_HASH_BYTES; i++) printf("%02x", hashes[(BLOCKS - 1) * KV_HASH_BYTES + i]);
            printf("\n");
        }
    }
    printf("best %s\n", kv_sha_best()->name);
    return 0;
}
