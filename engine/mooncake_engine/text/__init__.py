"""Between text and tokens: tokenizer, detokenizer, stop strings, tool calls, text of a choice."""
