"""Your own decode loop, in five steps from plain PyTorch to KV that is shared, cooled, spilled and rolled back.

`python examples/own_loop.py [MODEL_FOLDER]` runs it; docs/how-to/your-own-decode-loop.md explains it step by step.
"""

import sys

import torch

from engine_adapter import HFRunner, SequenceSlice, StepBatch, StoreAdapter, load_model
from kvstore import Identity, KVStore, KVStoreConfig


def plain(model, prompt, count):  # step 0: what you have
    ids, cache, out = torch.tensor([prompt]), None, []
    while len(out) < count:
        with torch.inference_mode():
            answer = model(input_ids=ids, cache=cache, use_cache=True)
        out.append(int(answer.logits[0, -1].argmax()))
        ids, cache = torch.tensor([out[-1:]]), answer.cache
    return out


class Loop:
    def __init__(self, name, model, weights, config):  # step 1: a store for the model, and the model on its slab
        self.runner = HFRunner(model)
        identity = Identity(model=name, weights=weights, geometry=self.runner.geometry)
        self.store = KVStore(self.runner.geometry, identity, config)
        self.runner.attach(self.store.slab, self.store.cold_codec)
        self.adapter = StoreAdapter(self.store)

    def start(self, name, prompt):  # step 2: what is there of the prompt, here or in a tier below
        while (given := self.adapter.reserve(name, prompt)).ask_again:  # a server is being asked
            self.rest()
        ready, loading = given.ready_tokens, given.pending_tokens > 0
        while loading:  # a real loop serves others meanwhile
            self.rest()
            for event in self.adapter.load():
                ready, loading = event.ready_tokens, False
        return ready

    def rest(self):
        self.store.wait(0.01)
        self.store.step()

    def forward(self, name, ids, start, rows=1):  # step 3: room, places, one pass over blocks; best tokens of `rows`
        self.adapter.allocate(name, len(ids))
        groups = range(len(self.store.geometry.groups))
        places = tuple(self.store.slot_mapping(name, group, start, len(ids)) for group in groups)
        part = SequenceSlice(name, ids, start, rows, self.store.tables(name), places)
        return self.runner.forward(StepBatch((part,))).argmax(-1).tolist()

    def generate(self, name, prompt, count, guess=lambda ids: []):
        ready = self.start(name, prompt)
        out = self.forward(name, prompt[ready:], ready)
        self.adapter.commit(name, prompt[ready:])
        self.store.prefill_done(name)
        while len(out) < count:
            self.store.step()  # step 4: between passes; cools, spills and fetches a bounded amount
            drafts = guess(prompt + out)[: count - len(out) - 1]
            best = self.forward(name, out[-1:] + drafts, len(prompt) + len(out) - 1, 1 + len(drafts))
            right = next((at for at, draft in enumerate(drafts) if draft != best[at]), len(drafts))
            if right < len(drafts):
                self.adapter.rollback(name, len(drafts) - right)  # step 5: drafts that were wrong leave no trace
            self.adapter.commit(name, out[-1:] + drafts[:right])
            out += best[: right + 1]
        self.adapter.finish(name)
        return out, ready


if __name__ == "__main__":
    loaded = load_model(sys.argv[1] if len(sys.argv) > 1 else None, torch.float32)
    document = loaded.tokenizer("The ferry left at six because the tide would not wait. " * 12).input_ids
    questions = [document + loaded.tokenizer(text).input_ids for text in (" When did it leave?", " Why so early?")]
    expected = [plain(loaded.model, prompt, 16) for prompt in questions]
    loop = Loop(loaded.name, loaded.model, loaded.weights, KVStoreConfig(device_bytes="64 MiB", codec="raw"))
    for at, prompt in enumerate(questions):
        answer, reused = loop.generate(f"question {at}", prompt, 16, guess=lambda ids: ids[-9:-6])
        print(f"question {at}: {reused} of {len(prompt)} tokens reused, as without a store: {answer == expected[at]}")
    loop.store.close()
