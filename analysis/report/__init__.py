"""`kvscope report`: one page about a window. What is asked (`data`) becomes plain sections (`parts`), which
become HTML, Markdown or JSON (`html`, `text`)."""
