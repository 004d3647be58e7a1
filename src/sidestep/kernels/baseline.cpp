// The kernels for any machine.

#include "kernels.h"
