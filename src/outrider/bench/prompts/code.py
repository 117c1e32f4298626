"""Programs to write, change, explain and repair."""

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "Write a Python class Stack with push, pop, peek and is_empty.",
    "Write a JavaScript function that removes duplicates from an array and keeps the order.",
    "Write a SQL query that lists the five customers with the highest total of orders.",
    "Write a shell script that renames all .jpeg files in a folder to .jpg.",
    "Write a C function that reverses a string in place.",
    "Write a Python script that reads a CSV file and prints the mean of each numeric column.",
    "Write unit tests with pytest for a function is_palindrome(text).",
    "Write a Python decorator that measures how long a function takes.",
    "Write an HTML page with a form for a name and an e-mail address.",
    "Write a regular expression for dates like 2031-07-15 and explain each part.",
    """This function should sum the even numbers, and it does not. Find the mistake and write it again:

def sum_even(numbers):
    total = 0
    for n in numbers:
        if n % 2 == 1:
            total += n
    return total""",
    """Rewrite this loop as a list comprehension:

squares = []
for n in range(20):
    if n % 3 == 0:
        squares.append(n * n)""",
    """Add type hints and a docstring to this function:

def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value""",
    """Explain what this program prints, and why:

a = [1, 2, 3]
b = a
b.append(4)
print(a)""",
    """Rename the variable x to radius in this code and give me the whole code back:

import math

def area(x):
    return math.pi * x * x

def circumference(x):
    return 2 * math.pi * x

for x in (1, 2, 5):
    print(x, area(x), circumference(x))""",
)
