"""Between text and tokens: tokenizer, incremental detokenizer, stop strings, text of an answer."""
