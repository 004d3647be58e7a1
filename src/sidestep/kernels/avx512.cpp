// The kernels for machines with AVX-512.

#include "kernels.h"
