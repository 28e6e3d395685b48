"""Conversion between text and tokens: tokenizer, detokenizer, stop strings, tools, grammars."""
