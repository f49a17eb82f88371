"""Use a trained model: predict with it, export it, publish it, try it on a keyboard, and personalize it for one user.

Modules:

    model                open a run folder, an export or a personal model, and predict with it; an export needs no torch
    step                 compute one step of a trained model in torch
    export               write a run's model as ONNX in float32 and int8, after comparing it with the trained model
    card                 write the model card: a README.md with the claim, the accuracy and the privacy report
    hugging_face_export  write a model as an adapter, as a whole model, as GGUF, or as a folder for the hub
    personalize          continue training on one user's own text, for that user only
    keyboard/            serve a phone keyboard on a local web page, with the suggestions of one or two models

Example:

    from unheard.deployment.model import open_model

    open_model("runs/private").predict("see you", top=3)        # [('tomorrow', 0.21), ...]
"""
