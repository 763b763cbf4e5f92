//! In-place resize actuation: applies changed resources to running pods (spec 03a §10).
//!
//! Memory before CPU. At each step the pod's limits cover those of its containers: increases are
//! applied to the pod first, decreases to the containers first.

use tokio::time::Instant;
use tracing::warn;

use super::{
    pod_sync::PodSync,
    resize::{self, ResizeDirection, ResizeTarget, Update},
};
use berth_cri::CriError;
use berth_ports::{ActionKind, PodCgroupValues};
use berth_proto::cri;
use berth_types::{ContainerId, ContainerKind, Pod, api};

/// Resource whose values are changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Resource {
    Memory,
    Cpu,
}

impl Resource {
    fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Cpu => "cpu",
        }
    }
}

/// Order of the pod-level steps for increases; decreases use the reverse order.
const LIMIT_THEN_REQUEST: [Part; 2] = [Part::Limit, Part::Request];
const REQUEST_THEN_LIMIT: [Part; 2] = [Part::Request, Part::Limit];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Limit,
    Request,
}

impl PodSync<'_> {
    /// Executes the resize of this sync and records its result.
    pub(super) async fn resize(&mut self) {
        let began = Instant::now();
        let _resizes = self.req.progress.start_concurrent("in-place resize");
        let done = self.resize_in_order().await;
        let success = if done.is_ok() { "true" } else { "false" };
        let elapsed = began.elapsed().as_secs_f64() * 1000.0;
        self.rt.deps.metrics.resize.with_label_values(&[success]).observe(elapsed);
        self.outcome.acted = true;
        let name = self.req.pod.name().to_owned();
        match done {
            Ok(()) => self.succeeded(ActionKind::ResizePodInPlace, &name),
            Err(err) => {
                warn!(pod = %self.req.pod.object_name(), podUID = %self.req.pod.uid(), err, "Failed to resize pod");
                self.failed(ActionKind::ResizePodInPlace, &name, "ResizePodInPlaceError", err);
            }
        }
    }

    async fn resize_in_order(&mut self) -> Result<(), String> {
        let pod = self.req.pod.clone();
        let resources = &self.rt.deps.resources;
        let wanted = resources.desired_pod_values(&pod).map_err(|e| e.to_string())?;
        let mut current = resources.current_pod_values(&pod).await.map_err(|e| e.to_string())?;
        self.feasible(&pod, wanted, current).await?;
        for resource in [Resource::Memory, Resource::Cpu] {
            self.resize_one(resource, wanted, &mut current).await?;
        }
        if self.actions.resize.pod_level {
            self.rt.deps.actuated.set_pod_level(pod.uid(), pod.spec().resources.clone());
        }
        Ok(())
    }

    async fn resize_one(
        &mut self,
        resource: Resource,
        wanted: PodCgroupValues,
        current: &mut PodCgroupValues,
    ) -> Result<(), String> {
        for part in LIMIT_THEN_REQUEST {
            self.move_pod(resource, part, ResizeDirection::Up, wanted, current).await?;
        }
        let updates = match resource {
            Resource::Memory => self.actions.resize.memory.clone(),
            Resource::Cpu => self.actions.resize.cpu.clone(),
        };
        for (target, _) in updates {
            self.update_container(resource, &target).await?;
        }
        for part in REQUEST_THEN_LIMIT {
            self.move_pod(resource, part, ResizeDirection::Down, wanted, current).await?;
        }
        Ok(())
    }

    /// Applies one pod-level value if it changes in that direction: to the runtime first, then to the
    /// cgroup.
    async fn move_pod(
        &self,
        resource: Resource,
        part: Part,
        way: ResizeDirection,
        wanted: PodCgroupValues,
        current: &mut PodCgroupValues,
    ) -> Result<(), String> {
        let Some((next, change)) = moved(resource, part, way, wanted, *current) else { return Ok(()) };
        let pod = &self.req.pod;
        self.update_sandbox_resources(next).await.map_err(|e| e.to_string())?;
        if let Err(err) = self.rt.deps.resources.apply_pod_values(pod, change).await {
            if let Err(err) = self.update_sandbox_resources(*current).await {
                warn!(pod = %pod.object_name(), podUID = %pod.uid(), %err, "Failed to roll back pod resources in the runtime");
            }
            return Err(err.to_string());
        }
        *current = next;
        Ok(())
    }

    async fn update_sandbox_resources(&self, values: PodCgroupValues) -> Result<(), CriError> {
        let Some(sandbox) = &self.sandbox else { return Ok(()) };
        let overhead = self.rt.deps.prepare.pod_resources(&self.req.pod).overhead;
        let resources = without(values, &overhead);
        match self.rt.deps.cri.update_pod_sandbox_resources(sandbox.as_str(), overhead, resources).await {
            Err(err) if is_not_implemented(&err) => Ok(()),
            answer => answer,
        }
    }

    async fn update_container(&mut self, resource: Resource, target: &ResizeTarget) -> Result<(), String> {
        let pod = self.req.pod.clone();
        let Some(container) = definition(&pod, target) else { return Ok(()) };
        let applied = self.actuated.as_ref().and_then(|a| a.containers.get(&container.name));
        let next = resize::with_resource(applied, container.resources.as_ref(), resource.name());
        let changed = api::Container { resources: Some(next.clone()), ..container.clone() };
        let linux = self.rt.deps.prepare.container_resources(&pod, &changed);
        self.outcome.acted = true;
        let updated = self.rt.deps.cri.update_container_resources(target.id.as_str(), linux).await;
        updated.map_err(|e| e.to_string())?;
        self.rt.deps.actuated.set_container(pod.uid(), &container.name, next.clone());
        self.actuated.get_or_insert_default().containers.insert(container.name.clone(), next);
        Ok(())
    }

    /// A memory limit must not be set below the current usage: the kernel would OOM-kill.
    async fn feasible(&self, pod: &Pod, wanted: PodCgroupValues, current: PodCgroupValues) -> Result<(), String> {
        let mut refused = Vec::new();
        let tightens = |limit: i64| current.memory_limit.is_none_or(|now| limit < now);
        if let Some(limit) = wanted.memory_limit.filter(|limit| *limit > 0 && tightens(*limit)) {
            refused.extend(too_low("pod", limit, self.memory_of(pod, None).await));
        }
        for (target, Update { from, to, .. }) in &self.actions.resize.memory {
            let tightens = to.memory_limit > 0 && (from.memory_limit == 0 || to.memory_limit < from.memory_limit);
            let Some(container) = definition(pod, target).filter(|_| tightens) else { continue };
            let used = self.memory_of(pod, Some(&target.id)).await;
            refused.extend(too_low(&format!("container {:?}", container.name), to.memory_limit, used));
        }
        match refused.as_slice() {
            [] => Ok(()),
            [one] => Err(format!("cannot decrease memory limits: {one}")),
            many => Err(format!("cannot decrease memory limits: [{}]", many.join(", "))),
        }
    }

    /// Memory usage; without pod cgroups the runtime's container stats are used.
    async fn memory_of(&self, pod: &Pod, container: Option<&ContainerId>) -> Result<u64, String> {
        let used = self.rt.deps.resources.memory_usage(pod, container).await.map_err(|e| e.to_string())?;
        if let Some(used) = used {
            return Ok(used);
        }
        let id = container.ok_or("pod cgroups are disabled")?;
        let filter = cri::ContainerStatsFilter { id: id.as_str().to_owned(), ..Default::default() };
        let stats = self.rt.deps.cri.list_container_stats(Some(filter)).await.map_err(|e| e.to_string())?;
        usage(&stats, id).ok_or_else(|| "not reported by the runtime".to_owned())
    }
}

/// Memory usage of a container from the runtime's stats.
fn usage(stats: &[cri::ContainerStats], id: &ContainerId) -> Option<u64> {
    let of_it = stats.iter().find(|s| s.attributes.as_ref().is_some_and(|a| a.id == id.as_str()))?;
    let memory = of_it.memory.as_ref()?;
    let used = memory.usage_bytes.as_ref().or(memory.working_set_bytes.as_ref())?;
    Some(used.value)
}

fn definition<'a>(pod: &'a Pod, target: &ResizeTarget) -> Option<&'a api::Container> {
    match target.kind {
        ContainerKind::Init => pod.init_containers().get(target.index),
        ContainerKind::Regular => pod.containers().get(target.index),
        ContainerKind::Ephemeral => None,
    }
}

fn too_low(what: &str, limit: i64, used: Result<u64, String>) -> Option<String> {
    match used {
        Ok(used) if i64::try_from(used).is_ok_and(|used| used < limit) => None,
        Ok(used) => Some(format!("attempting to set {what} memory limit ({limit}) below current usage ({used})")),
        Err(err) => Some(format!("missing {what} memory usage: {err}")),
    }
}

/// The pod values after one step, and the change alone; `None` if the value does not change in that
/// direction. A value that is not desired stays as it is: limits cannot be removed. No value means no
/// limit.
fn moved(
    resource: Resource,
    part: Part,
    way: ResizeDirection,
    wanted: PodCgroupValues,
    current: PodCgroupValues,
) -> Option<(PodCgroupValues, PodCgroupValues)> {
    let none = PodCgroupValues::default();
    let wide = |value: Option<i64>| value.filter(|v| *v > 0).unwrap_or(i64::MAX);
    let (from, to, next, change) = match (resource, part) {
        (Resource::Memory, Part::Request) => return None,
        (Resource::Memory, Part::Limit) => {
            let memory_limit = Some(wanted.memory_limit?);
            let next = PodCgroupValues { memory_limit, ..current };
            (wide(current.memory_limit), wide(memory_limit), next, PodCgroupValues { memory_limit, ..none })
        }
        (Resource::Cpu, Part::Limit) => {
            let (cpu_quota, cpu_period) = (Some(wanted.cpu_quota?), wanted.cpu_period.or(current.cpu_period));
            let next = PodCgroupValues { cpu_quota, cpu_period, ..current };
            (wide(current.cpu_quota), wide(cpu_quota), next, PodCgroupValues { cpu_quota, cpu_period, ..none })
        }
        (Resource::Cpu, Part::Request) => {
            let cpu_shares = Some(wanted.cpu_shares?);
            let number = |shares: Option<u64>| shares.and_then(|s| i64::try_from(s).ok()).unwrap_or(0);
            let next = PodCgroupValues { cpu_shares, ..current };
            (number(current.cpu_shares), number(cpu_shares), next, PodCgroupValues { cpu_shares, ..none })
        }
    };
    let moves = match way {
        ResizeDirection::Up => to > from,
        ResizeDirection::Down => to < from,
    };
    moves.then_some((next, change))
}

/// Converts pod values for the runtime: without the pod overhead.
fn without(values: PodCgroupValues, overhead: &cri::LinuxContainerResources) -> cri::LinuxContainerResources {
    let number = |value: Option<u64>| value.and_then(|v| i64::try_from(v).ok()).unwrap_or(0);
    let less = |value: i64, by: i64| if value > by { value - by } else { value };
    cri::LinuxContainerResources {
        cpu_period: number(values.cpu_period),
        cpu_quota: less(values.cpu_quota.unwrap_or(0), overhead.cpu_quota),
        cpu_shares: less(number(values.cpu_shares), overhead.cpu_shares),
        memory_limit_in_bytes: less(values.memory_limit.unwrap_or(0), overhead.memory_limit_in_bytes),
        ..Default::default()
    }
}

/// containerd 2.2 returns `Unknown` instead of `Unimplemented`.
fn is_not_implemented(error: &CriError) -> bool {
    let vague = |code: &tonic::Code, text: &str| *code == tonic::Code::Unknown && text.contains("not implemented");
    error.is_unimplemented() || matches!(error, CriError::Rpc { code, message } if vague(code, message))
}
