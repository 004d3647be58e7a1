// The kernels for machines with AVX2 and FMA.

#include "kernels.h"
