"""WebShop (Yao et al. 2022, "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents").

`mini` is an engine of our own with a catalogue of our own: the same pages, actions and reward, but not the same goods.
Its figures are not WebShop scores. `local` plays an installed web_agent_site, `http` a server of it.
"""
