name = "Ada"
print(f"Hello, {nam}!")
