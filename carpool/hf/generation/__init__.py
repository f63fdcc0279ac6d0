"""How does a model whose experts are spread over ranks write text?"""
