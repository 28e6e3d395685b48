"""The flows of a request: pull and push between P and D, SGLang's, and plain on one instance."""
