"""The forward pre-hooks of megatron-core's DistributedDataParallel, without torch."""


class DistributedDataParallel:
    def __init__(self, module):
        self.module = module
        self.use_forward_hook = True
        self.remove_forward_pre_hook_handles = {}

    def enable_forward_pre_hook(self):
        assert self.use_forward_hook
        assert len(self.remove_forward_pre_hook_handles) == 0
        for module in self.module.modules():
            handle = module.register_forward_pre_hook(lambda *unused: None)
            self.remove_forward_pre_hook_handles[module] = handle

    def disable_forward_pre_hook(self, param_sync: bool = True):
        assert self.use_forward_hook
        for module in self.module.modules():
            assert self.remove_forward_pre_hook_handles[module] is not None
            self.remove_forward_pre_hook_handles[module].remove()
            del self.remove_forward_pre_hook_handles[module]
        assert len(self.remove_forward_pre_hook_handles) == 0

        if param_sync:
            self.start_param_sync(force_sync=True)

    def start_param_sync(self, *unused, force_sync: bool = False, force_dispatch: bool = False):
        pass
