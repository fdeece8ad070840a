/* Writing a step's K and V into full slots, token by token: one copy a head. */
#include <string.h>

#include "paged.h"

void kv_write_tokens(const kv_write *write) {
    const kv_plan *plan = write->plan;
    const size_t item = plan->dtype == KV_F32 ? 4 : 2;
    const size_t key_bytes = plan->key_dim * item, value_bytes = plan->value_dim * item;
    uint8_t *layer = (uint8_t *)(uintptr_t)plan->full_address + write->layer * plan->full_layer_bytes;
    for (int64_t i = 0; i < write->tokens; i++) {
        const int64_t slot = write->slot_mapping[i] / plan->block_tokens;
        const int64_t offset = write->slot_mapping[i] % plan->block_tokens;
        uint8_t *to = layer + slot * plan->full_slot_bytes + offset * (int64_t)key_bytes;
        uint8_t *value_to = layer + slot * plan->full_slot_bytes + plan->block_tokens * (int64_t)key_bytes +
                            offset * (int64_t)value_bytes;
        const uint8_t *keys = write->keys + i * write->key_token_bytes;
        const uint8_t *values = write->values + i * write->value_token_bytes;
        for (int64_t head = 0; head < plan->kv_heads; head++) {
            memcpy(to + head * plan->full_head_bytes, keys + head * write->key_head_bytes, key_bytes);
            if (value_bytes)
                memcpy(value_to + head * plan->full_head_bytes, values + head * write->value_head_bytes, value_bytes);
        }
    }
}
