"""The networks: from one that communicates much per computation (mlp) to one that hardly does (convnet)."""
