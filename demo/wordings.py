"""The wordings of questions: patterns used in training, and held-out patterns that training never sees.

In a pattern `[a|b]` is a choice, questions.py fills `{slot}`, and `{in}` is empty or names the picture (" in the
picture", " in the second picture"). A pattern without `{in}` is used only for questions about a single picture.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class QuestionKind(StrEnum):
    """The subject of a question. The last three compare pictures and need at least two; LIST is about a single one."""

    COLOUR = "colour"
    SHAPE = "shape"
    COUNT = "count"
    POSITION = "position"
    DESCRIBE = "describe"
    LIST = "list"
    WHICH_PICTURE = "which_picture"
    COUNT_TOGETHER = "count_together"
    MORE_SHAPES = "more_shapes"


class Split(StrEnum):
    """A set of wordings: the shortest ones, those of training, or those held out from it."""

    TERSE = "terse"
    TRAINING = "training"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Wordings:
    """The patterns for one kind of question, by split."""

    terse: str
    """The fewest words, for the first lessons of the training."""
    training: tuple[str, ...]
    held_out: tuple[str, ...]

    def of(self, split: Split) -> tuple[str, ...]:
        """Returns the patterns of a split."""
        return {Split.TERSE: (self.terse,), Split.TRAINING: self.training, Split.HELD_OUT: self.held_out}[split]


_THINGS = "[shapes|shapes|objects|figures|things]"

WORDINGS: Final[dict[QuestionKind, Wordings]] = {
    QuestionKind.COLOUR: Wordings(
        terse="colour of the {shape}{in}",
        training=(
            "What colour is the {shape}{in}?",
            "What is the colour of the {shape}{in}?",
            "Which colour does the {shape}{in} have?",
            "What colour does the {shape} have{in}?",
            "[Tell me|Name|Give me|Say] the colour of the {shape}{in}.",
            "The {shape}{in} is what colour?",
            "What colour has the {shape}{in}?",
            "[Can|Could] you tell me what colour the {shape}{in} is?",
            "In [what|which] colour is the {shape}{in} drawn?",
            "I see a {shape}{in}. What colour is it?",
            "There is a {shape}{in}. Which colour is it?",
            "Do you know the colour of the {shape}{in}?",
            "{shape}{in}: [which|what] colour?",
            "What is the {shape}'s colour{in}?",
            "I would like to know the {shape}'s colour{in}.",
            "Which colour [do you see on|has] the {shape}{in}?",
            "Can you see what colour the {shape}{in} has?",
            "Name the {shape}'s colour{in}.",
            "Do you know [which|what] colour the {shape}{in} has?",
            "I want to know the colour of the {shape}{in}.",
            "Could you name the {shape}'s colour{in}?",
            "Please say which colour was used for the {shape}{in}.",
            "What can you say about the colour of the {shape}{in}?",
        ),
        held_out=(
            "Which colour is the {shape}{in}?",
            "Can you name the colour of the {shape}{in}?",
            "Tell me which colour the {shape}{in} has.",
            "Do you see what colour the {shape}{in} is?",
            "I would like to know what colour the {shape}{in} is.",
            "What is the name of the {shape}'s colour{in}?",
            "The {shape}{in} has which colour?",
        ),
    ),
    QuestionKind.SHAPE: Wordings(
        terse="shape of the {colour} one{in}",
        training=(
            "What shape is the {colour} [one|object|thing|figure]{in}?",
            "What shape is {colour}{in}?",
            "What is the shape of the {colour} [one|object|thing|figure]{in}?",
            "Which shape is [{colour}|the {colour} one]{in}?",
            "[Tell me|Name|Give me|Say] the shape of the {colour} [object|thing|figure]{in}.",
            "The {colour} [object|thing|figure]{in} is what shape?",
            "What shape does the {colour} [one|object|thing]{in} have?",
            "[Can|Could] you tell me what shape the {colour} one{in} is?",
            "I see something {colour}{in}. What shape is it?",
            "There is something {colour}{in}. Which shape is it?",
            "Do you know the shape of the {colour} [object|thing|figure]{in}?",
            "{colour} [one|object|thing]{in}: [which|what] shape?",
            "Which shape has the colour {colour}{in}?",
            "I would like to know the shape of the {colour} [one|object]{in}.",
            "Do you know [which|what] shape the {colour} [one|thing|object]{in} has?",
            "Can you see what shape the {colour} [object|figure]{in} has?",
            "I want to know what shape is {colour}{in}.",
            "Name the {colour} [object|thing|figure]'s shape{in}.",
            "Could you name the shape that is {colour}{in}?",
            "Say which shape is {colour}{in}.",
            "What can you say about the shape of the {colour} [one|object]{in}?",
        ),
        held_out=(
            "Which shape is the {colour} [thing|object|figure]{in}?",
            "Can you name the shape of the {colour} [object|one]{in}?",
            "Tell me which shape the {colour} [object|thing]{in} has.",
            "What shape has the colour {colour}{in}?",
            "Do you see what shape the {colour} one{in} is?",
            "What is the name of the {colour} shape{in}?",
            "The {colour} [one|object]{in} has which shape?",
        ),
    ),
    QuestionKind.COUNT: Wordings(
        terse="how many{in}",
        training=(
            f"How many {_THINGS} are there{{in}}?",
            f"How many {_THINGS} are{{in}}?",
            f"How many {_THINGS} [do you see|can you see|can be seen]{{in}}?",
            f"What is the number of {_THINGS}{{in}}?",
            f"Count the {_THINGS}{{in}}.",
            f"[Tell me|Give me|Say] the number of {_THINGS}{{in}}.",
            f"[Can|Could] you count the {_THINGS}{{in}}?",
            f"[Tell me|Say] how many {_THINGS} there are{{in}}.",
            f"I see some {_THINGS}{{in}}. How many are there?",
            f"The number of {_THINGS}{{in}} is what?",
            f"What number of {_THINGS} is drawn{{in}}?",
            f"How many {_THINGS} were drawn{{in}}?",
            f"Can you say how many {_THINGS} you see{{in}}?",
            f"Do you see how many {_THINGS} there are{{in}}?",
            f"I want to know the number of {_THINGS}{{in}}.",
            f"How many {_THINGS} can you find{{in}}?",
            f"Could you tell me how many {_THINGS} can be seen{{in}}?",
            f"In total, how many {_THINGS} are there{{in}}?",
            f"Count up the total of the {_THINGS}{{in}}.",
            f"How many {_THINGS} in all can you see{{in}}?",
        ),
        held_out=(
            f"What is the count of {_THINGS}{{in}}?",
            f"How many {_THINGS} would you say there are{{in}}?",
            f"Do you know how many {_THINGS} there are{{in}}?",
            f"How many {_THINGS} are drawn{{in}}?",
            f"Can you tell me the number of {_THINGS}{{in}}?",
            f"I would like to know how many {_THINGS} there are{{in}}.",
            f"Please count all {_THINGS}{{in}}.",
            f"What is the total number of {_THINGS}{{in}}?",
        ),
    ),
    QuestionKind.POSITION: Wordings(
        terse="position of the {thing}{in}",
        training=(
            "Where is the {thing}{in}?",
            "Where [do you see|can you see] the {thing}{in}?",
            "Where{in} is the {thing}?",
            "What is the position of the {thing}{in}?",
            "[Tell me|Say] where the {thing}{in} is.",
            "[Can|Could] you tell me where the {thing} is{in}?",
            "[Tell me|Give me|Name] the position of the {thing}{in}.",
            "In [what|which] place is the {thing}{in}?",
            "Which position does the {thing} have{in}?",
            "I see a {thing}{in}. Where is it?",
            "There is a {thing}{in}. Where is it?",
            "Do you know the position of the {thing}{in}?",
            "Where was the {thing} drawn{in}?",
            "{thing}{in}: where?",
            "Do you see where the {thing}{in} is?",
            "Could you name the place of the {thing}{in}?",
            "I want to know where to find the {thing}{in}.",
            "Where can I find the {thing}{in}?",
            "Which place does the {thing} have{in}?",
            "Can you show me where the {thing} is{in}?",
            "Where has the {thing} been drawn{in}?",
            "I would like to know the position of the {thing}{in}.",
        ),
        held_out=(
            "Do you know where the {thing} is{in}?",
            "Where can the {thing} be seen{in}?",
            "I would like to know where the {thing} is{in}.",
            "What position does the {thing} have{in}?",
            "Can you name the position of the {thing}{in}?",
            "At which position is the {thing}{in}?",
            "Where exactly is the {thing}{in}?",
        ),
    ),
    QuestionKind.DESCRIBE: Wordings(
        terse="describe {picture}",
        training=(
            "Describe {picture}.",
            "What is in {picture}?",
            "What do you see in {picture}?",
            "[Tell me|Say] what is in {picture}.",
            "What does {picture} show?",
            "List [the shapes|the objects|everything] in {picture}.",
            "[Can|Could] you describe {picture}?",
            "[Give me|I would like] a description of {picture}.",
            "Which shapes [are in|can be seen in|do you see in] {picture}?",
            "Tell me what {picture} shows.",
            "What is drawn in {picture}?",
            "What has been drawn in {picture}?",
            "What can you see in {picture}?",
            "What [do|can] you find in {picture}?",
            "Can you say what you see in {picture}?",
            "Could you list what is in {picture}?",
            "List all that was drawn in {picture}.",
            "I would like to know what is in {picture}.",
            "Name everything that can be seen in {picture}.",
            "Which objects were drawn in {picture}?",
            "What objects does {picture} show?",
        ),
        held_out=(
            "Tell me what you see in {picture}.",
            "What can be seen in {picture}?",
            "What was drawn in {picture}?",
            "Can you tell me what is in {picture}?",
            "List what you see in {picture}.",
            "Please describe everything in {picture}.",
            "What is there to see in {picture}?",
        ),
    ),
    QuestionKind.LIST: Wordings(
        terse="list {picture} as JSON",
        training=(
            "Describe {picture} as JSON.",
            "List [the shapes|the objects|everything] in {picture} as JSON.",
            "What is in {picture}? Answer as JSON.",
            "What do you see in {picture}? [Answer|Reply] in JSON.",
            "[Give me|I would like] a description of {picture} as JSON.",
            "[Can|Could] you describe {picture} as JSON?",
            "[Return|Write|Give me] JSON with the [shapes|objects] in {picture}.",
            "As JSON: what does {picture} show?",
            "Which [shapes|objects] are in {picture}? Use JSON.",
            "Write JSON that describes {picture}.",
            "[Tell me|Say] in JSON what is in {picture}.",
            "Name the shapes in {picture} as JSON.",
            "JSON of what is drawn in {picture}.",
            "I want to have {picture} described as JSON.",
        ),
        held_out=(
            "Please describe {picture} in JSON.",
            "What does {picture} show? Answer in JSON.",
            "I would like JSON with the shapes in {picture}.",
            "Tell me as JSON what you see in {picture}.",
            "List all shapes in {picture} as JSON.",
        ),
    ),
    QuestionKind.WHICH_PICTURE: Wordings(
        terse="which has a {thing}",
        training=(
            "Which [picture|image] has a {thing}, {choices}?",
            "Which [picture|image] has a {thing}?",
            "Which [picture|image] shows a {thing}, {choices}?",
            "In which [picture|image] is there a {thing}?",
            "In which [picture|image] do you see a {thing}, {choices}?",
            "Where is there a {thing}, in {choices} [picture|image]?",
            "Is there a {thing} in {choices} [picture|image]?",
            "[Tell me|Say] which [picture|image] has a {thing}.",
            "[Tell me|Say] in which [picture|image] there is a {thing}, {choices}.",
            "A {thing} can be seen in which [picture|image], {choices}?",
            "{choices}: which [picture|image] has a {thing}?",
            "Which of the [pictures|images] has a {thing}?",
            "[Can|Could] you tell me which [picture|image] shows a {thing}?",
            "In which [picture|image] can a {thing} be seen?",
            "Which [picture|image] can you see a {thing} in, {choices}?",
            "Can you see a {thing} in {choices} [picture|image]?",
            "In which of the [pictures|images] do you see a {thing}?",
            "Do you see which [picture|image] has a {thing}, {choices}?",
            "In which [picture|image] was a {thing} drawn?",
            "Name the [picture|image] with a {thing}, {choices}.",
            "Which is the [picture|image] with a {thing}?",
            "A {thing} is in which of the [pictures|images]?",
            "I would like to know which [picture|image] has a {thing}.",
        ),
        held_out=(
            "Which of the [pictures|images] shows a {thing}, {choices}?",
            "In which [picture|image] can you see a {thing}?",
            "Which [picture|image] is the one with a {thing}, {choices}?",
            "Do you know which [picture|image] has a {thing}?",
            "Which one of the [pictures|images] has a {thing}?",
            "Can you tell me in which [picture|image] there is a {thing}?",
        ),
    ),
    QuestionKind.COUNT_TOGETHER: Wordings(
        terse="how many in {all}",
        training=(
            f"How many {_THINGS} are there in {{all}} together?",
            f"How many {_THINGS} are there in {{all}} in total?",
            f"How many {_THINGS} are in {{all}} [together|in total]?",
            f"Together, how many {_THINGS} are in {{all}}?",
            f"In total, how many {_THINGS} [do you see|can you see] in {{all}}?",
            f"What is the total number of {_THINGS} in {{all}}?",
            f"Count the {_THINGS} in {{all}} together.",
            f"Count all the {_THINGS} in {{all}}.",
            f"[Tell me|Say] how many {_THINGS} there are in {{all}} together.",
            f"How many {_THINGS} do {{all}} have together?",
            f"[Tell me|Give me] the total number of {_THINGS} in {{all}}.",
        ),
        held_out=(
            f"In total, how many {_THINGS} are there in {{all}}?",
            f"How many {_THINGS} do {{all}} show together?",
            f"What is the number of {_THINGS} in {{all}} together?",
            f"Can you count all the {_THINGS} in {{all}}?",
        ),
    ),
    QuestionKind.MORE_SHAPES: Wordings(
        terse="which has more shapes",
        training=(
            f"Which [picture|image] has more {_THINGS}, {{choices}}?",
            f"Which [picture|image] has more {_THINGS}?",
            f"Which [picture|image] shows more {_THINGS}, {{choices}}?",
            f"In which [picture|image] are there more {_THINGS}?",
            f"[Tell me|Say] which [picture|image] has more {_THINGS}.",
            f"Are there more {_THINGS} in {{choices}} [picture|image]?",
            f"In which [picture|image] do you see more {_THINGS}, {{choices}}?",
            f"Which of the [pictures|images] has more {_THINGS}?",
            f"{{choices}}: which [picture|image] has more {_THINGS}?",
            f"Which [picture|image] is the one with more {_THINGS}, {{choices}}?",
            f"In which of the [pictures|images] can more {_THINGS} be seen?",
            f"Do you know which [picture|image] has more {_THINGS}?",
            f"Where do you see more {_THINGS}, in {{choices}} [picture|image]?",
            f"In which [picture|image] were more {_THINGS} drawn, {{choices}}?",
            f"Can you see more {_THINGS} in {{choices}} [picture|image]?",
            f"I would like to know which [picture|image] has more {_THINGS}.",
        ),
        held_out=(
            f"Which of the [pictures|images] shows more {_THINGS}, {{choices}}?",
            f"Do you see more {_THINGS} in {{choices}} [picture|image]?",
            f"In which [picture|image] can you see more {_THINGS}?",
            f"Can you tell me which [picture|image] has more {_THINGS}?",
            f"Which one of the [pictures|images] has more {_THINGS}, {{choices}}?",
        ),
    ),
}

TRAINING_OPENERS: Final = (
    "Look at the picture. ",
    "Please answer: ",
    "Question: ",
    "Hello! ",
    "Now, ",
    "And ",
    "Please, ",
    "Next question: ",
    "One more question. ",
    "Thank you. ",
    "OK, ",
    "Well, ",
    "So, ",
    "Then, ",
    "Great. ",
    "Hi! ",
    "Look. ",
    "Look at this. ",
    "Look closely. ",
    "Here is a picture. ",
    "Here I have a question. ",
    "Here: ",
)
HELD_OUT_OPENERS: Final = ("Look here. ", "And now, ", "Hello, ", "Please look at the picture. ", "Good. ")
TRAINING_CLOSERS: Final = (" Please answer.", " Thank you.", " Answer in a few words.", " Answer briefly.", " Please.")

SYSTEM_TEXTS: Final = (
    "You are a helpful assistant.",
    "You answer questions about pictures.",
    "Answer briefly.",
    "You are Lookonce, a model that looks at pictures. Answer in a few words.",
    "Be short and exact.",
    "Answer the user's questions about the pictures.",
)

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def choose(pattern: str, rng: random.Random) -> str:
    """Returns a random expansion of the pattern's choices, with its slots unfilled."""
    return _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), pattern)


def all_expansions(pattern: str) -> set[str]:
    """Returns every expansion of the pattern's choices, with the slots unfilled."""
    pieces = _CHOICE.split(pattern)
    options = [piece.split("|") if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return {"".join(chosen) for chosen in itertools.product(*options)}
