"""What other programs take from kvscope, and what kvscope takes from them: `kvscope export` and `import`."""
