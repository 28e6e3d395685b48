"""The cost model: seconds of prefills, decode steps, KV loads and KV transfers."""
