"""Prompts to measure with, written for this project, by kind of text."""

CODE = (
    "Write a Python function that reverses a string.",
    "Write a Python function that checks whether a number is prime.",
    "Write a Python class for a bank account with deposit and withdraw methods.",
    "Write a Python function that counts how often each word occurs in a text.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Write a Python program that reads a CSV file and prints the average of its second column.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Write an SQL query that lists the ten customers with the highest total orders.",
    "Write a Python function that merges two sorted lists into one sorted list.",
    "Write a bash script that renames all .txt files in a folder to .md.",
    "Write a Python function that converts a temperature from Celsius to Fahrenheit and back.",
    "Write a C function that computes the length of a string without the standard library.",
    "Write a Python decorator that prints how long a function takes.",
    "Write a Python function that flattens a nested list.",
    "Write an HTML page with a form that asks for a name and an email address.",
    "Write unit tests in Python for a function add(a, b).",
    "Write a Python generator that yields the lines of a file that contain a given word.",
    "Write a Python function that finds the longest common prefix of a list of strings.",
    "Write a Java class that represents a point with x and y and a distance method.",
    "Write a Python function that transposes a matrix given as a list of lists.",
)

MATH = (
    "Compute 37 * 24 step by step.",
    "A train travels 180 km in 3 hours. How long does it need for 300 km? Explain each step.",
    "Solve the equation 3x + 7 = 22 and check the result.",
    "What is 15 percent of 240? Show your work.",
    "A rectangle is 12 cm long and 7 cm wide. Find its area and its perimeter.",
    "List the first ten multiples of 9 and add them up.",
    "Anna has 5 apples and buys 3 bags with 4 apples each. How many apples does she have? Explain.",
    "Simplify (2x + 3)(x - 4) step by step.",
    "Convert 3/8 to a decimal and to a percentage.",
    "What is the sum of the numbers from 1 to 100? Explain the trick.",
    "A shirt costs 40 dollars and is reduced by 25 percent. What does it cost now?",
    "Find the average of 4, 8, 15, 16, 23 and 42.",
    "How many seconds are there in a week? Show the calculation.",
    "Solve x^2 - 5x + 6 = 0 by factoring.",
    "A recipe for 4 people needs 300 g of flour. How much flour do 10 people need?",
    "Write 84 as a product of prime factors.",
    "Two dice are thrown. What is the probability that the sum is 7? Explain.",
    "A car uses 6 litres per 100 km. How much does it need for 450 km?",
    "Explain how to add 2/3 and 3/5.",
    "A circle has a radius of 5 cm. Compute its circumference and its area.",
)

CHAT = (
    "What is the capital of France, and why is it famous?",
    "Give me three tips for sleeping better.",
    "Explain how a rainbow forms to a child.",
    "What are the advantages and disadvantages of working from home?",
    "Describe the water cycle.",
    "Who was Marie Curie?",
    "Suggest a simple dinner with rice and vegetables.",
    "Why is the sky blue?",
    "Write a short thank-you note to a colleague who helped me move.",
    "What should I pack for a weekend in the mountains?",
    "Explain the difference between weather and climate.",
    "How do I start learning the guitar?",
    "Tell me about the history of the bicycle.",
    "What makes a good friend?",
    "Summarise why regular exercise is healthy.",
    "Describe a day in the life of a lighthouse keeper.",
    "What are black holes?",
    "How can I save money on groceries?",
    "Explain what inflation means in simple words.",
    "Write a polite email asking for a meeting next week.",
)

_SNIPPET = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        total = total + price
    total = total + total * tax_rate
    return total
"""
_LETTER = (
    "Dear Mr. Walker, thank you for your letter of March 3rd. We have checked your order and found that two of the "
    "five boxes were sent to the wrong address. We are sorry for the delay and will send the missing boxes on Monday."
)

COPY = (
    f"Repeat this code exactly:\n\n{_SNIPPET}",
    f"Rewrite this code with the variable total renamed to result:\n\n{_SNIPPET}",
    f"Add a docstring to this function and print the whole function:\n\n{_SNIPPET}",
    f"Quote this letter word for word:\n\n{_LETTER}",
    f"Correct the spelling in this text and print it again:\n\n{_LETTER}",
    f"Print the following text twice:\n\n{_LETTER}",
    "Repeat this list and add one more animal: cat, dog, horse, cow, sheep, goat, duck, hen, goose, turkey, donkey.",
    "Copy this JSON and change the city to Rome:\n\n"
    '{"name": "Julia Winter", "age": 42, "city": "Vienna", "languages": ["German", "English"], "member": true}',
)

WORKLOADS: dict[str, tuple[str, ...]] = {"code": CODE, "math": MATH, "chat": CHAT, "copy": COPY}
