"""The forward pre-hooks of megatron-core's DistributedDataParallel, to be judged and not run."""


class DistributedDataParallel:
    def enable_forward_pre_hook(self):
        assert self.use_forward_hook
        assert len(self.remove_forward_pre_hook_handles) == 0

    def disable_forward_pre_hook(self, param_sync: bool = True):
        assert self.use_forward_hook
        for module in self.module.modules():
            self.remove_forward_pre_hook_handles[module].remove()
