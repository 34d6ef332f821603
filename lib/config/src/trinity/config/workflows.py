"""Names of the built-in workflows and reward functions; the explorer and the environment service implement them."""

WORKFLOWS = ("simple_workflow", "math_workflow")
REWARD_FUNCTIONS = ("accuracy_reward", "math_reward", "math_boxed_reward", "countdown_reward")

DEFAULT_WORKFLOW = "simple_workflow"
DEFAULT_REWARD_FUNCTION = "math_reward"
