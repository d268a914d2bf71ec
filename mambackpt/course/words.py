"""The words and letters of the course, as the notebooks' tables define them."""

# The words of the course, by the notebook whose table defines them. A row may define several.
GLOSSARY: dict[str, dict[str, str]] = {
    "01": {
        "request": "a prompt and what is generated after it",
        "step": "what the engine runs at once: some tokens of some requests",
        "query": "the tokens of *one* request that one step computes",
        "prefill chunk": "a query that lies in the prompt; a long prompt takes several",
        "decode": (
            "a query of one token that was generated: it adds one attention entry, and "
            "overwrites the state"
        ),
        "state": (
            "what a recurrent layer knows after a token: its memory, and the convolution window"
        ),
        "position": "a token count at which a state exists",
        "checkpoint": "a state that is saved *inside* a prefill chunk, in passing",
        "block, pool": (
            "a slot for M tokens' attention entries, or for *one* state; the pool is all of "
            "them, with a number each"
        ),
        "row, column": (
            "a request's list of blocks; column c stands for its c-th run of M tokens, from 0"
        ),
        "running, previous, null": (
            "the column of the newest state; the one that the query started from; a column "
            "without a block"
        ),
        "key, promise": (
            "what a cache looks up; key 96 promises the state after a prompt's first 96 tokens"
        ),
        "hash unit": "H tokens under one key",
        "hit": "the tokens that a request resumes after",
        "group": "layers that keep the same kind of thing, and so share one row per request",
        "drop": (
            "with speculative decoding the last unit that matches is computed again: hits "
            "land one unit earlier"
        ),
        "frame": (
            "one picture of a film; a film's frames are *not* the engine's steps: one step "
            "may take several frames"
        ),
    },
    "02": {
        "junction": "where a prefix that was seen before stops being shared",
        "budget": "the most tokens that one step computes; a longer prompt takes several steps",
        "scheduler": "decides how far a request runs in this step",
        "allocator": "decides which columns get a block, and which block gets a key",
        "retention": (
            "which block ends keep a key: every one, or (retention 0) only a prompt's last "
            "one and junctions"
        ),
    },
    "03": {
        "exporter": "what stores a checkpoint in a block while the prefill runs",
        "restore": "what a hit does: the request goes on from the state in that block",
    },
    "04": {
        "worker": "the party that computes, with the exporter in it; 02 calls it the backend",
        "predicate": "the six conditions of notebook 02: can a checkpoint be written here?",
        "held": "the tokens whose state a block *really* contains",
        "dense": (
            "the retention that keeps every block boundary; with R = 0 only a prompt's last "
            "one and junctions stay, with a larger R every R tokens one more"
        ),
        "variant": "a set of the scheduler's rules: a release's (`vllm-0.33`), or a fix of it",
    },
    "05": {
        "stride": "how many numbers lie between one block, token or channel and the next",
        "token-first, dim-first": (
            "a window whose channels lie side by side, token by token; or whose 3 tokens "
            "lie side by side, channel by channel"
        ),
        "program": "one of them; it knows its two numbers in the *grid*",
        "tile": "the numbers that one program works on",
        "access": "what a thread moves at once: 16 bytes at most",
        "warp": "32 threads (AMD: 64) that run each instruction together",
        "register, spill": (
            "a thread's own few numbers; one that had to be parked in memory for want of registers"
        ),
        "sm_80, sm_90, sm_100, gfx942": (
            "what a compiler calls its targets: NVIDIA's A100, H100 and B200 generations, "
            "AMD's MI300"
        ),
        "meta": "a torch tensor with a shape and no memory",
    },
    "06": {
        "trace": (
            "requests in the order of their arrival: prompt lengths, and which prefixes they share"
        ),
        "placement rule": "says after which tokens of a prompt a state is kept",
        "attention hit": "the longest prefix of a prompt whose attention cache is still there",
        "joint hit": (
            "the deepest kept state within the attention hit: a hybrid model resumes after it"
        ),
        "recomputed": "prompt tokens that were not reused: the work that is left to do",
        "reuse ceiling": (
            "the hit rate of a model without recurrent layers and with unlimited memory"
        ),
        "exchange rate": "tokens of attention cache that take as many bytes as one state",
    },
    "07": {
        "boot log": (
            "what an engine prints when it starts; two of its lines give away most of its settings"
        ),
        "concurrency": "requests of the longest length that fit at once",
        "staircase": "what a prompt recomputes, over its length",
        "review pack": "all of this on one page",
    },
}
# The letters, all of them tokens, by the table of notebook 01.
LETTERS: dict[str, str] = {
    "M": "a block: the tokens that one column stands for",
    "H": "a hash unit: every position with a key is a multiple of it",
    "U": (
        "the hit alignment: a hit may land only on a multiple of it; usually U = H, some "
        "engines set U = M"
    ),
    "A": "the kernel grid: the prefill kernel can save a state only at s + A, s + 2A, …",
    "L": "the tokens of a request after this step",
    "q": "those of them that this step computes",
    "s": "where the query starts: s = L − q",
}
