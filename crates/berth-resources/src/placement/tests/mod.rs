//! Tests of the placement manager with state files, a fake runtime, and crashes.

#[cfg(test)]
mod admission;
#[cfg(test)]
mod checkpoints;
#[cfg(test)]
mod crash_simulation;
#[cfg(test)]
mod exclusive_cpu_resize;
#[cfg(test)]
mod figures;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod memory_placement;
#[cfg(test)]
mod metrics;
#[cfg(test)]
mod offline_cpus;
#[cfg(test)]
mod pod_level_resources;
#[cfg(test)]
mod running_containers;
#[cfg(test)]
mod state_renewal;
