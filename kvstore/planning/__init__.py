"""What a model needs before it runs: shapes from configs, KV bytes, requests that fit, floors of time.

Pure arithmetic over allocator's geometry and the codecs' record sizes; imports neither torch nor transformers.

    model_config     a Hugging Face config (file or object) -> ModelShape
    builtin_shapes   configs known by name
    cards            memory, bandwidth and arithmetic of known cards
    record_sizes     bytes of a cold block, from quant's layouts
    capacity         bytes, requests that fit, floors of ITL and TTFT
    effects          what GQA, windows, MLA, INT4 and sharing each change
    plan_page        the report as HTML
"""
