"""Prompts of the speculation benchmark: ordinary questions, and work that copies (quote, edit, JSON)."""

CHAT = [
    "What is the capital of France, and what is it known for?",
    "Explain how rain forms, in simple words.",
    "Write a short story about a fox who learns to swim.",
    "How do I make a good cup of coffee?",
    "What are three differences between cats and dogs?",
    "Give me advice for my first job interview.",
    "Explain what a computer program is to a ten-year-old.",
    "Why do leaves change colour in autumn?",
    "Write a polite email asking my landlord to fix the heating.",
    "What should I pack for a weekend in the mountains?",
    "Describe the life cycle of a butterfly.",
    "How does a bicycle stay upright?",
    "Suggest a simple dinner with rice and vegetables.",
    "What is the difference between weather and climate?",
    "Tell me about the history of the printing press.",
    "How can I sleep better at night?",
    "What makes a good friend?",
    "Explain photosynthesis briefly.",
    "Write a poem about the sea.",
    "How do vaccines work?",
    "What is inflation in an economy?",
    "Name some benefits of regular exercise and explain them.",
    "Write a Python function that adds two numbers, and explain it.",
    "What would you see on a walk through a rainforest?",
]

_TEXT = (
    "The old lighthouse stood on the northern cliff for more than two hundred years. Fishermen from the village of "
    "Harrow Bay used its light to find their way home through the fog. In 1911 a storm broke the great lens, and the "
    "keeper, Martha Quill, lit forty lanterns by hand to keep the ships safe. The village still celebrates Lantern "
    "Night every November, when children carry paper lanterns along the cliff path."
)
_CODE = (
    "def total_price(items, tax_rate):\n    total = 0\n    for item in items:\n        total = total + item.price * "
    "item.quantity\n    total = total + total * tax_rate\n    return total\n"
)
_TABLE = (
    "Anna Berg, age 34, engineer, Oslo\nTom Hale, age 41, teacher, Leeds\nMina Sato, age 29, designer, Kyoto\n"
    "Luis Ortega, age 52, doctor, Madrid\nIvy Chen, age 38, lawyer, Taipei"
)

COPY = [
    f"Repeat the following text exactly, word for word:\n\n{_TEXT}",
    f"Correct any spelling mistakes in this text and write out the whole text again:\n\n{_TEXT}",
    f"Rewrite this text, replacing Martha Quill by Edith Moore, and change nothing else:\n\n{_TEXT}",
    f"Quote the sentence about the storm from this text, then quote the sentence about Lantern Night:\n\n{_TEXT}",
    f"Here is a Python function:\n\n{_CODE}\nRename the variable total to amount and print the whole function again.",
    f"Add a docstring to this Python function and print the whole function:\n\n{_CODE}",
    f"Copy this Python function without any change:\n\n{_CODE}",
    f'Turn this list into a JSON array of objects with the keys "name", "age", "profession" and "city":\n\n{_TABLE}',
    f"Write this list again, one line per person, in the same order:\n\n{_TABLE}",
    f"Write this list as a Markdown table with the columns name, age, profession and city:\n\n{_TABLE}",
    f"Repeat this text, and then repeat it once more:\n\n{_TEXT[:210]}",
    f"Split this text into bullet points, one sentence each, without changing the words:\n\n{_TEXT}",
]
