// Any aten op on device tensors, run by the CPU's kernel on the same bytes.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <unordered_set>
#include <vector>

#include "waits.h"

namespace emulation {

using c10::IValue;
using Names = std::unordered_set<std::string>;

// Ops that may mix devices on a real NPU, too: copies, and indices in host memory.
inline bool may_mix(const std::string& name) {
  static const Names names{
      "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_to_copy",
      "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::index_put",
      "aten::index_put.out", "aten::_index_put_impl_", "aten::_index_put_impl.out",
      "aten::set_data", "aten::_foreach_copy_"};
  return names.count(name) > 0;
}

// Ops that support a private format; any other op would read it as plain rows.
inline bool takes_private_format(const std::string& name) {
  static const Names names{"aten::mm", "aten::addmm", "aten::bmm", "aten::mm.out",
                           "aten::addmm.out", "aten::bmm.out"};
  return names.count(name) > 0;
}

// One call that is forwarded to the CPU's kernel.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), name_(c10::toString(op.operator_name())) {
    base_ = stack->size() - op.schema().arguments().size();
  }

  void run() {
    look();
    lower();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    finish_inputs();
    lift();
  }

 private:
  // Finds the device, and rejects what a real one would reject.
  void look() {
    for (size_t i = base_; i < stack_->size(); i++) {
      const auto& value = (*stack_)[i];
      if (value.isTensor()) {
        see(value.toTensor());
      } else if (value.isTensorList()) {
        for (const Tensor& each : value.toTensorVector()) see(each);
      } else if (value.isOptionalTensorList()) {
        for (const auto& each : value.toOptionalTensorVector()) {
          if (each.has_value()) see(*each);
        }
      } else if (value.isDevice() && value.toDevice().type() == NPU && !device_) {
        device_ = value.toDevice();
      }
    }
    TORCH_CHECK(!(device_ && other_) || may_mix(name_),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                *device_, " and ", *other_, "! (in ", name_, ")");
    if (device_ && other_) note_wait(c10::str(name_, " takes indices from the host"));
  }

  void see(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() != NPU) {
      // a scalar in a tensor may come from the host
      if (tensor.device().type() != c10::DeviceType::Meta && tensor.dim() > 0) other_ = tensor.device();
      return;
    }
    if (!device_) device_ = tensor.device();
    else if (*device_ != tensor.device()) other_ = tensor.device();
    const Block* block = books().find(tensor.storage().data());
    TORCH_CHECK(!block || block->format == FORMAT_ND || takes_private_format(name_), name_,
                " would read memory of format ", block ? block->format : 0, " as plain rows");
  }

  // Device tensors become the CPU's views of them.
  void lower() {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto& value = (*stack_)[base_ + i];
      const auto* alias = arguments[i].alias_info();
      if (value.isTensor()) {
        value = IValue(lower_tensor(i, value.toTensor(), alias && alias->isWrite()));
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        lists_.emplace_back(i, list);
        for (auto& each : list) each = as_cpu(each);
        value = IValue(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (auto& each : value.toOptionalTensorVector()) {
          list.push_back(each.has_value() ? std::optional<Tensor>(as_cpu(*each)) : std::nullopt);
        }
        value = IValue(list);
      } else if (value.isDevice() && value.toDevice().type() == NPU) {
        value = IValue(c10::Device(at::kCPU));
      } else if (value.isGenerator() && value.toGenerator().device().type() == NPU) {
        value = IValue(lower_generator(value.toGenerator()));
      }
    }
  }

  Tensor lower_tensor(size_t argument, const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    tensors_.emplace_back(argument, tensor);
    if (tensor.device().type() != NPU) return tensor;
    if (!is_written || tensor.numel()) return as_cpu(tensor);
    // an empty output is resized by the kernel: it gets a tensor of its own, copied afterwards
    const auto options = tensor.options().device(at::kCPU);
    resized_.emplace_back(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), options));
    return resized_.back().second;
  }

  at::Generator lower_generator(at::Generator ours) {
    auto made = at::make_generator<at::CPUGeneratorImpl>();
    std::lock_guard<std::mutex> guard(ours.mutex());
    made.set_state(ours.get_state());
    generators_.emplace_back(ours, made);
    return made;
  }

  void finish_inputs() {
    for (auto& [ours, used] : generators_) {
      std::lock_guard<std::mutex> guard(ours.mutex());
      ours.set_state(used.get_state());
    }
    for (auto& [ours, filled] : resized_) {
      if (ours.sizes() != filled.sizes()) ours.resize_(filled.sizes());
      if (filled.numel()) as_cpu(ours).copy_(filled);
    }
  }

  // The kernel's results become device tensors: the caller's own tensor if the kernel wrote into it.
  void lift() {
    const auto& returns = op_.schema().returns();
    const size_t base = stack_->size() - returns.size();
    for (size_t i = 0; i < returns.size(); i++) {
      auto& value = (*stack_)[base + i];
      const auto* alias = returns[i].alias_info();
      if (value.isTensor()) {
        value = IValue(alias ? written(*alias) : to_npu(value.toTensor(), device()));
      } else if (value.isTensorList()) {
        auto list = alias ? lists_.at(0).second : value.toTensorVector();
        for (auto& each : list) each = to_npu(each, device());
        value = IValue(list);
      }
    }
  }

  Tensor written(const c10::AliasInfo& alias) const {
    TORCH_CHECK(alias.isWrite(), "the emulated device has no kernel of its own for the view ", name_);
    for (const auto& [argument, tensor] : tensors_) {
      const auto* theirs = op_.schema().arguments()[argument].alias_info();
      if (theirs && theirs->isWrite() && theirs->afterSets() == alias.afterSets()) return tensor;
    }
    TORCH_CHECK(false, name_, " returns a tensor that none of its arguments is");
  }

  c10::Device device() const {
    const c10::Device found = device_.value_or(c10::Device(NPU, current_device));
    return found.has_index() ? found : c10::Device(NPU, current_device);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::string name_;
  size_t base_ = 0;
  std::optional<c10::Device> device_, other_;
  std::vector<std::pair<size_t, Tensor>> tensors_;
  std::vector<std::pair<size_t, std::vector<Tensor>>> lists_;
  std::vector<std::pair<at::Generator, at::Generator>> generators_;
  std::vector<std::pair<Tensor, Tensor>> resized_;
};

inline void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

// Registers kernels for every aten op with a CPU kernel. Otherwise in-place ops would be decomposed,
// and not be in place. Returns how many.
inline int64_t register_fallbacks() {
  static auto* kept = new std::vector<c10::RegistrationHandleRAII>;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) ||
        !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) {
      continue;
    }
    const auto& returns = op->schema().returns();
    const bool is_view = std::any_of(returns.begin(), returns.end(), [](const auto& each) {
      return each.alias_info() && !each.alias_info()->isWrite();
    });
    if (is_view) continue;
    kept->push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::PrivateUse1,
        c10::KernelFunction::makeFromBoxedFunction<&run_on_cpu>(), std::nullopt, nullptr,
        "npu emulation"));
  }
  return static_cast<int64_t>(kept->size());
}

}  // namespace emulation
