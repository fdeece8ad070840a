"""A small OpenAI-compatible server around the decode loop: `python -m engine_adapter.server`.

    engine_thread   the loop on a thread of its own; requests in, tokens out
    messages        JSON of the OpenAI interface to requests, and answers back; texts piece by piece
    http_app        the routes (the one file that imports starlette)
    answers         one request's answer, whole or as a stream
    __main__        the command line (uvicorn)

For trying the store with any client, and for measuring it (`kvstore doctor --url`): one process, one model, no queue
but the loop's own. It listens on this machine only unless it is told otherwise, and then wants a token.
"""
