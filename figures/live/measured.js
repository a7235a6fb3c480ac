window.MEASURED = {"ms": [7.4, 5.1], "made": "NVIDIA H200, 64 heads, N = 4,096, d = 128"};
