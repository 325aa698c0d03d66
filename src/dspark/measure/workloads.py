"""Prompts to measure with, written for this project, by kind of text.

Short enough for a model of a hundred million parameters, and open enough that a larger one fills the answer's length.
Answers of `EXTRACTION` mostly repeat text that the prompt gives: the best case of looking drafts up.
"""

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
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Write a Python function that returns the second largest number of a list.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a Python function that sorts a list of dictionaries by a given key.",
    "Write a Python script that downloads a web page and saves it to a file.",
    "Write a JavaScript function that formats a date as day, month and year.",
    "Write an SQL statement that creates a table for books with title, author and year.",
    "Write a Python function that computes the greatest common divisor of two numbers.",
    "Write a shell script that prints the five largest files in a folder.",
    "Write a Python function that validates an email address with a regular expression.",
    "Write a C program that prints the numbers from 1 to 100, with Fizz and Buzz.",
    "Write a Python context manager that measures the time its block takes.",
    "Write a Python function that splits a list into chunks of a given size.",
    "Write a CSS rule that centres a box on the page, and explain it.",
    "Write a pytest test for a function that divides two numbers and raises an error for zero.",
    "Write a Python function that reads a JSON file and returns its keys in alphabetical order.",
    "Write a Python function that performs a binary search in a sorted list.",
    "Write a Java method that counts the vowels in a string.",
    "Write a Python function that multiplies two matrices without libraries.",
    "Write a Python class for a queue of tasks with priorities.",
    "Write a Python function that turns a Roman numeral into a number.",
    "Write a JavaScript function that fetches data from a URL and logs it.",
    "Write an SQL query that counts the orders of each customer in the last month.",
    "Write a Python function that generates a random password of a given length.",
    "Write a Python program that asks for a number and says whether it is even or odd.",
    "Write a Go function that returns the sum of a slice of integers.",
    "Write a Python function that finds all anagrams of a word in a list of words.",
    "Write a Python dataclass for a product with name, price and quantity, and a method for its total.",
    "Write a Rust function that returns the maximum of a vector of numbers.",
    "Write a Python function that checks whether brackets in a string are balanced.",
    "Write a Dockerfile for a small Python web application.",
    "Write a Python function that computes the factorial of a number, once with a loop and once with recursion.",
    "Write a JavaScript class for a timer with start, stop and reset.",
    "Write a Python function that draws a triangle of stars with a given height.",
    "Write a C++ class for a rectangle with methods for area and perimeter.",
    "Write a Python function that groups words by their first letter.",
    "Write a Python function that converts seconds into hours, minutes and seconds.",
    "Write a makefile with targets for building, testing and cleaning a C project.",
    "Write a Python command line program that counts lines, words and characters of a file.",
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
    "Compute 1250 divided by 8 step by step.",
    "A bus leaves at 9:40 and arrives at 13:15. How long is the ride? Explain.",
    "Solve the equation 5(x - 2) = 3x + 8.",
    "What is 7/12 of 360? Show your work.",
    "A square has an area of 81 square metres. How long is its side, and what is its perimeter?",
    "List the first eight powers of 2 and add them up.",
    "Tom has 48 marbles and gives a quarter of them to his sister. How many are left? Explain.",
    "Expand (x + 5)^2 and explain each step.",
    "Convert 0.625 to a fraction and to a percentage.",
    "What is the sum of the first 20 even numbers? Explain how to find it quickly.",
    "A laptop costs 900 dollars and becomes 12 percent dearer. What does it cost now?",
    "Find the median of 9, 3, 14, 7, 21, 5 and 11.",
    "How many minutes are there in the month of June? Show the calculation.",
    "Solve x^2 + 2x - 15 = 0 and check both results.",
    "Three painters need 8 days for a house. How long do four painters need?",
    "Find the greatest common divisor of 84 and 126.",
    "A bag holds 4 red and 6 blue balls. What is the probability of drawing a red one? Explain.",
    "A printer prints 24 pages a minute. How long does it need for 420 pages?",
    "Explain how to subtract 1/4 from 5/6.",
    "A cylinder has a radius of 3 cm and a height of 10 cm. Compute its volume.",
    "Solve the system x + y = 10 and x - y = 4.",
    "A farmer has chickens and cows, 30 heads and 84 legs. How many of each are there?",
    "What is the next number of 2, 6, 12, 20, 30? Explain the rule.",
    "A ladder of 5 m stands 3 m from a wall. How high does it reach?",
    "Maria saves 15 dollars a week. After how many weeks does she have 200 dollars?",
    "Compute the simple interest on 2000 dollars at 4 percent for 3 years.",
    "How many different ways are there to arrange the letters of the word CAT? List them.",
    "Round 3847.256 to the nearest hundred, ten, whole number and tenth.",
    "A map has a scale of 1 to 50000. How far apart are two towns that are 8 cm apart on the map?",
    "Explain why the angles of a triangle add up to 180 degrees.",
    "A tank of 600 litres is filled at 25 litres a minute and loses 5 litres a minute. When is it full?",
    "Compute 45 times 19 with the distributive law.",
    "What is the slope of the line through (1, 2) and (4, 11)? Explain.",
    "A class has 12 boys and 18 girls. What is the ratio of boys to girls in lowest terms?",
    "Convert 72 km per hour to metres per second.",
    "If f(x) = 2x^2 - 3x + 1, what are f(0), f(1) and f(2)?",
    "A cake is cut into 12 pieces. Ben eats 3 and Lisa eats 2. What fraction is left?",
    "Explain the difference between mean, median and mode with an example.",
    "What is 2 to the power of 10, and how can it be computed with few multiplications?",
    "The sum of three consecutive numbers is 72. Which numbers are they?",
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
    "What is the difference between a frog and a toad?",
    "How do I write a good shopping list for a week?",
    "Why do leaves change their colour in autumn?",
    "Give me five ideas for a rainy Sunday afternoon.",
    "Explain to a child where the wind comes from.",
    "What are the pros and cons of living in a big city?",
    "How does a refrigerator work?",
    "Who was Leonardo da Vinci, and what is he known for?",
    "Suggest a healthy breakfast that takes ten minutes.",
    "Why do we have leap years?",
    "Write a short birthday message for my brother who loves football.",
    "What do I need for my first day at the gym?",
    "Explain the difference between a virus and a bacterium.",
    "How can I learn to cook without much time?",
    "Tell me about the history of chocolate.",
    "How do I become a better listener?",
    "Why is it important to drink enough water?",
    "Describe what a baker does on an ordinary morning.",
    "What is a solar eclipse?",
    "How can I make my small flat look bigger?",
    "Explain what a budget is and why a family should have one.",
    "Write a polite message to my neighbour about loud music at night.",
    "Recommend three board games for two players and say why.",
    "What happens in our body when we are afraid?",
    "How do I take care of a cactus?",
    "What is the longest river in the world, and through which countries does it flow?",
    "How should I prepare for a job interview?",
    "Why do cats purr?",
    "Explain how a bill becomes a law.",
    "What should I see in Rome in two days?",
    "How do vaccines work?",
    "Tell me how to change the tyre of a bicycle.",
    "What is the difference between a comet and an asteroid?",
    "How can I stop checking my phone so often?",
    "Describe the taste of a lemon to someone who has never had one.",
    "What are good first books for a ten-year-old who does not like reading?",
    "Who invented the telephone, and how did it change the world?",
    "Give me advice on how to remember names.",
    "Why is bread fluffy?",
    "Write an invitation to a summer party in the garden.",
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

_RECIPE = (
    "Pancakes for four: mix 250 g of flour, two eggs, half a litre of milk and a pinch of salt. Let the batter rest "
    "for 20 minutes. Melt some butter in a pan, pour in a ladle of batter and fry each side for two minutes."
)
_MINUTES = (
    "Minutes of May 12th. Present: Ines Okafor, Paul Lindqvist, Ravi Shah. Ines reported that the new printer arrives "
    "on Thursday. Paul will call the landlord about the heating. Ravi asked for a second key; Ines will have one made "
    "by May 20th. The next meeting is on June 2nd at 10 a.m."
)
_LOG = """09:12 INFO  server started on port 8080
09:13 WARN  disk almost full: 91 %
09:15 ERROR cannot open file orders.csv
09:15 INFO  retrying in 5 seconds
09:16 ERROR cannot open file prices.csv
09:20 INFO  backup finished
"""
_TABLE = """name,department,city,salary
Brandt,Sales,Hamburg,41000
Costa,Support,Lisbon,38000
Dubois,Sales,Lyon,43500
Eriksen,Research,Oslo,52000
Fischer,Support,Bremen,37000
"""
_CONFIG = """server:
  host: localhost
  port: 8080
  timeout: 30
database:
  name: shop
  user: reader
  pool_size: 5
"""
_REVIEW = (
    "I bought the kettle in April. It boils a litre in three minutes and the handle stays cool. The lid is hard to "
    "open with one hand, and the cable is too short for our kitchen. For 35 euros I would buy it again."
)

EXTRACTION = (
    *COPY,
    f"List the ingredients of this recipe with their amounts, one per line:\n\n{_RECIPE}",
    f"Rewrite this recipe as numbered steps, keeping the wording:\n\n{_RECIPE}",
    f"List every person in these minutes and what they will do, in the words of the text:\n\n{_MINUTES}",
    f"Copy out each sentence of these minutes that contains a date:\n\n{_MINUTES}",
    f"Print only the lines of this log that contain ERROR:\n\n{_LOG}",
    f"Print this log again with INFO replaced by NOTE:\n\n{_LOG}",
    f"Turn this CSV table into a Markdown table:\n\n{_TABLE}",
    f"Print this table again, sorted by salary from high to low:\n\n{_TABLE}",
    f"Convert this YAML file to JSON:\n\n{_CONFIG}",
    f"Change the port to 9090 and the pool size to 10, and print the whole file:\n\n{_CONFIG}",
    f"Quote the sentences of this review that name a weakness:\n\n{_REVIEW}",
    f"Correct any mistakes in this review and print it in full:\n\n{_REVIEW}",
)

WRITING = (
    "Write a short story about a lighthouse that has lost its light.",
    "Write a poem of three verses about the first snow.",
    "Write the opening paragraph of a detective novel set in a small harbour town.",
    "Describe an old market square early in the morning.",
    "Write a letter from a traveller in the desert to a friend at home.",
    "Write a fairy tale about a fox who wanted to learn to read.",
    "Write a speech for the opening of a village library.",
    "Write a dialogue between a clockmaker and a customer who is always late.",
    "Write an advertisement for a bicycle repair shop.",
    "Write a blog post about growing tomatoes on a balcony.",
    "Write a product description for a warm wool blanket.",
    "Write a diary entry of a sailor on a calm day.",
    "Write a news report about a lost dog that walked home over the mountains.",
    "Write a short essay on why people collect things.",
    "Write a scene in which two old friends meet by chance at a railway station.",
    "Continue this story: When Mara opened the box, all she found was a key and a pressed flower.",
    "Write a limerick about a cat that likes the rain.",
    "Write a cover letter for a job as a gardener.",
    "Write a toast for a grandmother's eightieth birthday.",
    "Describe a storm at sea to someone who has never seen the ocean.",
)

TRANSLATION = (
    "Translate into French: The weather is nice today, and we are going for a walk by the river.",
    "Translate into Spanish: My sister lives in a small house near the sea with her two children.",
    "Translate into German: Could you please tell me where the nearest train station is?",
    "Translate into Italian: We would like a table for four people, if possible by the window.",
    "Translate into Portuguese: I have been learning your language for a year and I still make many mistakes.",
    "Translate into Dutch: The shop is closed on Sundays, but you can order on the website.",
    "Translate into English: Le petit garçon a perdu son chapeau dans le jardin et il le cherche depuis ce matin.",
    "Translate into English: Mañana por la mañana vamos a visitar a nuestros abuelos en el pueblo.",
    "Translate into English: Der Zug fährt um acht Uhr ab, deshalb müssen wir heute früh aufstehen.",
    "Translate into English: La biblioteca è aperta tutti i giorni, ma la domenica chiude a mezzogiorno.",
    "Translate these words into French, one per line: bread, water, apple, cheese, window, door, street, winter.",
    "Translate these words into Spanish, one per line: house, tree, dog, river, morning, night, school, teacher, book.",
    "Translate this notice into German: Please switch off the lights and close all windows before you leave the room.",
    "Translate this postcard into French: Greetings from the mountains. It snows every day, and we drink a lot of tea.",
    "Translate into Spanish and explain the grammar of the sentence: If I had more time, I would read more books.",
    "Translate into German and into French: Where did you buy these shoes, and how much did they cost?",
    "Say this sentence in French, Spanish and German: Thank you very much for your help.",
    "Rewrite this sentence in simple modern English: Whither goest thou at so late an hour, good sir?",
    "Translate into English and say what language it is: Jag tycker om att dricka kaffe på morgonen.",
    "Translate this message into Italian: I arrive on Friday at six. Can you meet me at the airport? I have two bags.",
)

WORKLOADS: dict[str, tuple[str, ...]] = {
    "code": CODE,
    "math": MATH,
    "chat": CHAT,
    "writing": WRITING,
    "extraction": EXTRACTION,
    "translation": TRANSLATION,
}
