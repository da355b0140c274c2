// Operators that run as programs.
#pragma once

#include "call.hpp"

namespace tpu_dist::device {

// Runs an operator on its arguments, and puts its results in their place.
void run(const Overload& overload, torch::jit::Stack* stack);

// The overload of this name, `copy_` or `add.Tensor`, if programs are made for it.
const Overload* find_overload(const std::string& name);

// Runs an operator on the CPU, counted.
void fall_back(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack,
    const std::string& reason);

} // namespace tpu_dist::device
