"""Show a phone keyboard on a local web page, with the words that one or two models suggest.

Modules:

    server          serve the page, the suggestions and the guarantees of the models, to this machine only
    suggestions     compute the words that a model suggests; its tokens may be words or pieces of words
    page/           the HTML, CSS and JavaScript of the page

Example:

    server = KeyboardServer([Suggester(open_model("runs/private"))])
    print(server.address)
    server.serve_forever()
"""
