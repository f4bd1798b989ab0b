"""Real vLLM engines on CPU: started, tamed, routed and loaded for the demo, the tests and the benchmark.

`model` makes a tiny model, `engines` starts prefill and decode engines on it, `router` sends each
request through both, `load` is the client that measures. Nothing here runs in production.
"""
