"""Why is a model slow? Time to first token and time between tokens, measured apart at an endpoint, and what they say.

    endpoint       one OpenAI-compatible server, asked over HTTP with streaming
    prompts        prompts that no cache can have seen
    measurements   what is asked in which order; the samples
    fits           the two phases as lines: a fixed part and one that grows
    shares         where the time of a request goes: queue, prompt, decode
    verdict        bottleneck, cause, evidence, remedies; or why there is none

Only the standard library; nothing here knows what runs behind the endpoint.
"""
