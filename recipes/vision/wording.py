"""The wording of questions and answers. The strings are training data: a change needs a new training."""

from __future__ import annotations

# {the}: a thing that is the only one of its kind. {Shape}: {shape} with a capital letter.
SHAPE_OF_ONE = (
    ("What shape is in the picture?", "A {shape}."),
    ("What shape is this?", "It is a {shape}."),
    ("Which shape do you see?", "I see a {shape}."),
    ("What shape is shown in the image?", "The image shows a {shape}."),
    ("Which shape is it? Answer with one word.", "{Shape}"),
    ("Name the shape in one word.", "{Shape}"),
    ("What is the shape in this picture?", "The shape is a {shape}."),
)
SHAPE_BY_COLOUR = (
    ("What shape is {colour}?", "The {shape} is {colour}."),
    ("Which shape is {colour}?", "The {shape}."),
    ("What is the {colour} shape?", "The {colour} shape is a {shape}."),
    ("What is the {colour} thing? Answer with one word.", "{Shape}"),
)
COLOUR_OF_ONE = (
    ("What {colour_word} is it?", "It is {colour}."),
    ("What {colour_word} is the shape?", "The shape is {colour}."),
    ("Which {colour_word} do you see?", "I see {colour}."),
    ("What is the {colour_word} of the shape? Answer with one word.", "{Colour}"),
)
COLOUR_BY_SHAPE = (
    ("What {colour_word} is the {shape}?", "The {shape} is {colour}."),
    ("Which {colour_word} does the {shape} have?", "The {shape} is {colour}."),
    ("What is the {colour_word} of the {shape}?", "It is {colour}."),
    ("Tell me the {colour_word} of the {shape} in one word.", "{Colour}"),
    ("The {shape} has which {colour_word}?", "{Colour}."),
)
COLOUR_OF_TEXT = (
    ("What {colour_word} is the text?", "The text is {colour}."),
    ("What {colour_word} is the writing?", "It is {colour}."),
    ("In which {colour_word} is it printed? Answer with one word.", "{Colour}"),
)
COLOUR_OF_GROUND = (
    ("What {colour_word} is the background?", "The background is {colour}."),
    ("What is the {colour_word} of the background? Answer with one word.", "{Colour}"),
)
PLACE = (
    ("Where is {the}?", "{The} is at the {place}."),
    ("In which part of the picture is {the}?", "At the {place}."),
    ("Where do you see {the}?", "I see it at the {place}."),
)
SIDE = (
    ("Is {the} left or right of {other}?", "{Side}."),
    ("On which side of {other} is {the}?", "On the {side}."),
)
HEIGHT = (("Is {the} above or below {other}?", "{Side}."),)
COUNT = (
    ("How many {things} are there?", "There {are} {n} {things_n}."),
    ("How many {things} do you see?", "I see {n} {things_n}."),
    ("How many {things} are in the picture? Answer with a number.", "{n}"),
    ("Count the {things}.", "{n}"),
)
NUMBER = (
    ("What number is in the picture?", "{text}"),
    ("What number do you see?", 'I see the number "{text}".'),
    ("Read the number.", "{text}"),
    ("Which number is this?", 'It is "{text}".'),
)
WORD = (
    ("What does it say?", 'It says "{text}".'),
    ("What does the picture say?", 'It says "{text}".'),
    ("Read the text.", "{text}"),
    ("What word is printed in the picture?", 'The word is "{text}".'),
    ("What is written here?", "{text}"),
)
DESCRIBE = ("Describe the picture.", "What is in the picture?", "What do you see?", "Describe this image.")
POINTING = (
    ("Which way does the arrow point?", "It points {direction}."),
    ("In which direction is the arrow pointing?", "{Direction}."),
)
PRESENT = ("Is there {a}?", "Is there {a} in the picture?", "Do you see {a}?", "Can you see {a}?")
BEFORE = ("", "", "", "", "", "Please look. ", "Look at the picture. ", "Hi! ", "I have a question. ")
