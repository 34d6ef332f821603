"""Gym-Card (Zhai et al. 2024, "Fine-Tuning Large Vision-Language Models as Decision-Making Agents via RL") in text:
NumberLine, EZPoints, Points24, BlackJack."""
