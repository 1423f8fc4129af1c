"""User prompts composed by a seeded grammar (task × topic): varied, short, ordinary, and the same in every run."""

from __future__ import annotations

import random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


_THINGS = _split(
    "volcano|glacier|solar panel|refrigerator|telescope|submarine|violin|sewing machine|wind turbine|compass|clock|"
    "steam engine|camera|battery|dishwasher|lighthouse|suspension bridge|greenhouse|microphone|parachute|elevator|"
    "hot air balloon|beehive|coral reef|thermometer|loudspeaker|touch screen|vacuum cleaner|traffic light|windmill"
)
_FIELDS = _split(
    "gravity|evaporation|magnetism|democracy|supply and demand|fermentation|friction|erosion|evolution|electricity|"
    "sound waves|tides|earthquakes|migration of birds|digestion|memory|taxes|insurance|interest rates|the water cycle|"
    "machine learning|encryption|the internet|recycling|the immune system|blood pressure|nutrition|plate tectonics|"
    "black holes|the seasons|cell division|probability|fractions|prime numbers|algebra|statistics|philosophy|ethics|"
    "public speaking|time management|the stock market|renewable energy|urban planning|architecture|jazz|opera|ballet|"
    "impressionism|mythology|the Roman Empire|ancient Egypt|the Renaissance|the Industrial Revolution|the Silk Road|"
    "the moon landing|the French Revolution|the Olympic Games|the United Nations|human rights|astronomy|meteorology"
)
_SKILLS = _split(
    "bake bread|grow tomatoes|learn a new language|save money|start running|write a cover letter|clean a kitchen|"
    "prepare for an exam|build a bird house|play chess|train a puppy|plan a birthday party|reduce stress|cook pasta|"
    "organise a desk|remove a stain|paint a wall|repair a flat tire|make new friends|improve my handwriting|"
    "give a presentation|read more books|start a blog|take better photos|learn to swim|care for a house plant|"
    "write a short poem|drink more water|stop biting my nails|choose a laptop|set up a home office|meditate|"
    "eat healthier|wake up earlier|manage a small team|ask for a raise|pack for a long trip|memorise a speech"
)
_HEROES = _split(
    "a shy dragon|a lost robot|an old sailor|a curious girl|two brothers|a talking tree|a brave mouse|a tired king|"
    "a young inventor|a lonely ghost|a baker|a violin player|a small island|a clever crow|a night watchman|a wizard|"
    "a postman|a snow leopard|a little star|an astronaut|a gardener|a detective|a forgetful teacher|a travelling circus"
)
_GOALS = _split(
    "finds a hidden door|wants to see the ocean|learns to forgive|wins a strange contest|gets lost in the forest|"
    "discovers an old letter|makes an unlikely friend|saves a village|must keep a promise|builds a flying machine|"
    "is afraid of the dark|looks for a missing key|travels through time|opens a small shop|hears a mysterious song"
)
_PLACES = _split(
    "Japan|Brazil|Canada|Egypt|India|Italy|Kenya|Mexico|Norway|Australia|Spain|Greece|Turkey|Peru|Vietnam|Morocco|"
    "Germany|Sweden|South Africa|Argentina|China|Portugal|Ireland|Thailand|New Zealand|Iceland|London|New York|Rome|"
    "Tokyo|Berlin|Sydney|Istanbul|Cairo|Amsterdam|Vienna|Barcelona|Chicago|Singapore|Prague"
)
_ANIMALS = _split(
    "elephant|penguin|honey bee|octopus|owl|dolphin|wolf|tortoise|hummingbird|bat|spider|salmon|camel|kangaroo|frog|"
    "polar bear|shark|ant|horse|parrot|snake|squirrel|whale|giraffe|hedgehog|jellyfish"
)
_FOODS = _split(
    "lentils|potatoes|chicken|mushrooms|eggs|tofu|apples|pumpkin|salmon|beans|cheese|spinach|noodles|oats|carrots|"
    "bananas|chickpeas|tomatoes|yogurt|peppers"
)
_CODE = _split(
    "reverses a string|finds the largest number in a list|counts the vowels in a word|checks whether a number is prime|"
    "sorts a list of names|computes the factorial of a number|removes duplicates from a list|reads a text file|"
    "converts Celsius to Fahrenheit|merges two dictionaries|checks for a palindrome|prints the Fibonacci numbers|"
    "finds the average of a list|counts words in a sentence|filters even numbers|computes the area of a circle"
)
_PEOPLE = _split(
    "my boss|a colleague|my neighbour|a customer|my teacher|an old friend|the city council|a hotel|my grandmother|"
    "a bank|my team|a school principal|a shop"
)
_REASONS = _split(
    "asking for a day off|saying thank you|apologising for a late reply|cancelling an appointment|inviting them to "
    "dinner|complaining about noise|asking for a refund|asking for advice|congratulating them|reporting a problem|"
    "rescheduling a meeting|introducing myself|asking for a recommendation"
)
_SENTENCES = _split(
    "The meeting starts at nine, so please be there on time.|She bought three oranges and a loaf of bread.|"
    "We missed the train because the road was closed.|The museum is open from ten to five except on Mondays.|"
    "After the rain the children played in the garden.|He forgot his umbrella and came home wet.|"
    "The new library has more than fifty thousand books.|Our dog sleeps under the kitchen table all day.|"
    "They painted the old boat blue and named it Clara.|The price of coffee rose again last month.|"
    "My sister works in a hospital and often has night shifts.|The river was calm, and the lights shone on the water."
)

_SLOTS = {
    "thing": _THINGS,
    "field": _FIELDS,
    "skill": _SKILLS,
    "hero": _HEROES,
    "goal": _GOALS,
    "place": _PLACES,
    "animal": _ANIMALS,
    "food": _FOODS,
    "code": _CODE,
    "person": _PEOPLE,
    "reason": _REASONS,
    "sentence": _SENTENCES,
}

# Tasks by kind; kinds are drawn evenly, so that no kind is drowned by another one with more wordings.
_TASKS = (
    (
        "Explain {field} in simple words.",
        "What is {field}?",
        "Can you explain {field} to a child?",
        "Why is {field} important?",
        "Give me a short introduction to {field}.",
        "Tell me something surprising about {field}.",
        "What are the main ideas behind {field}?",
        "Write a paragraph about {field}.",
    ),
    (
        "How does a {thing} work?",
        "Who invented the {thing}?",
        "What are the parts of a {thing}?",
        "Describe a {thing} to someone who has never seen one.",
        "What are the advantages and disadvantages of a {thing}?",
    ),
    (
        "How do I {skill}?",
        "Give me five tips to {skill}.",
        "I want to {skill}. Where should I begin?",
        "What mistakes do people make when they try to {skill}?",
        "Write a step-by-step guide on how to {skill}.",
        "Make a one-week plan that helps me to {skill}.",
    ),
    (
        "Write a short story about {hero} who {goal}.",
        "Write a poem about {hero}.",
        "Begin a story in which {hero} {goal}.",
        "Write a dialogue between {hero} and {hero}.",
        "Tell me a bedtime story about {hero}.",
    ),
    (
        "What is the capital of {place}, and what can one do there?",
        "What should I see on a trip to {place}?",
        "Tell me about the history of {place}.",
        "What is the food like in {place}?",
        "Describe a perfect day in {place}.",
        "Compare {place} and {place}.",
        "What is the climate of {place}?",
    ),
    (
        "What does a {animal} eat?",
        "Where does the {animal} live?",
        "Give me three facts about the {animal}.",
        "What is the difference between a {animal} and a {animal}?",
        "How does a {animal} raise its young?",
    ),
    (
        "Suggest a recipe with {food} and {food}.",
        "Are {food} healthy?",
        "What can I cook with {food}?",
        "How long can I keep {food} in the refrigerator?",
        "Write a shopping list for a dinner with {food}.",
    ),
    (
        "Write a Python function that {code}.",
        "Write a JavaScript function that {code}, and explain it.",
        "How do I write a program that {code}?",
        "Show me a simple example of code that {code}.",
    ),
    (
        "Write a polite email to {person} {reason}.",
        "Write a short message to {person} {reason}.",
        "How would you start a letter to {person} {reason}?",
    ),
    (
        "Rewrite this sentence in other words: {sentence}",
        "Translate into French: {sentence}",
        "Summarise in five words: {sentence} {sentence}",
        "Correct the grammar, if needed: {sentence}",
        "Continue this text: {sentence}",
        "Make this text more formal: {sentence} {sentence}",
        "Repeat this text word for word: {sentence} {sentence}",
        "Turn this into a list: {sentence} {sentence} {sentence}",
    ),
    (
        "List ten words that have to do with {field}.",
        "Write three quiz questions about {field} with answers.",
        "Name two books for somebody who is interested in {field}.",
        "What jobs are there for people who like {field}?",
        "Write a catchy title for an article about {field}.",
        "Do you think that {field} will matter in fifty years?",
    ),
    (
        "What is {number} times {small}?",
        "If I buy {small} apples for {number} cents each, how much do I pay?",
        "Convert {number} kilometres to miles.",
        "A train travels {number} kilometres in {small} hours. How fast is it?",
    ),
)


_OPENINGS = ("", "", "", "Please help me. ", "Hello! ", "I have a question. ", "Quick question: ", "For my homework: ")
_ENDINGS = (
    "",
    "",
    "",
    " Answer briefly.",
    " Give an example.",
    " Use two or three sentences.",
    " Explain your answer.",
    " Use a list.",
    " Keep it simple.",
    " Be as detailed as you can.",
)


def compose(seed: int, index: int) -> str:
    """Prompt number `index`: depends on nothing but the two numbers."""
    rng = random.Random(f"prompt {seed} {index}")
    parts = rng.choice(rng.choice(_TASKS)).split("{")
    text = rng.choice(_OPENINGS) + parts[0]
    for part in parts[1:]:
        slot, _, rest = part.partition("}")
        if slot == "number":
            text += str(rng.randrange(12, 400))
        elif slot == "small":
            text += str(rng.randrange(3, 12))
        else:
            text += rng.choice(_SLOTS[slot])
        text += rest
    return text + rng.choice(_ENDINGS)
