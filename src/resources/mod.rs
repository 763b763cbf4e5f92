//! Shares of the machine: cgroup names, values and the pod cgroup tree.
