"""Generation with a placed model, by a KV cache and a pipeline that decoding keeps full."""
