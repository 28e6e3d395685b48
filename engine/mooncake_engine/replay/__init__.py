"""``mooncake-engine bench`` and ``bench serve``: load tests of OpenAI endpoints. Needs no torch."""
