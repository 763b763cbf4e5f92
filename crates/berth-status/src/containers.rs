//! Converts runtime observations to the API's container statuses. Pure. Implements spec 02b §3.
//!
//! Steps per container: start value from the specification and the old status; then the newest instance (and the
//! previous one as `lastState`), or the meaning of its absence; finally the reason why it does not start.

use super::{
    StatusInput,
    lookup::{ContainerStateRef, end_not_observed, exit, find, last_exit, state, terminated, waiting},
    phase::RESTARTING_ALL,
    resources::container_resources,
};
use berth_types::{
    ContainerKind, Pod, api,
    observation::{ContainerState, ObservedContainer},
    restart_decision::should_start,
};

/// Reason of a container whose end was not observed.
pub const STATUS_UNKNOWN: &str = "ContainerStatusUnknown";
/// Message of a container that was missing when its pod terminated.
pub const LOST_AT_END: &str = "The container could not be located when the pod was terminated";
const LOST_WHILE_RUNNING: &str =
    "The container could not be located when the pod was deleted.  The container used to be Running";
const REMOVED_FOR_RESTART: &str = "The container is removed because RestartAllContainers in place";
const INIT_FORGOTTEN: &str = "Unable to get init container status from container runtime and pod has been \
                              initialized, treat it as exited normally";

/// Conversion of one list of container statuses.
pub(super) struct Conversion<'a> {
    /// Inputs of the build.
    pub input: &'a StatusInput<'a>,
    /// Kind of containers.
    pub kind: ContainerKind,
    /// The same list of the previous status.
    pub old: &'a [api::ContainerStatus],
    /// Whether all containers are being restarted.
    pub restarting: bool,
}

impl Conversion<'_> {
    /// Converts the status of one container.
    pub fn convert(&self, container: &api::Container) -> api::ContainerStatus {
        let old = find(self.old, &container.name);
        let start = self.start_value(container, old);
        let mut instances = self.input.observed.containers.iter().filter(|c| *c.name == container.name);
        let newest = instances.next();
        let mut status = match newest {
            None => self.missing(start, old),
            Some(instance) => {
                let mut status = self.present(instance, container, start, old);
                if let Some(before) = instances.next() {
                    status.last_state = Some(self.instance_state(before, old));
                }
                status
            }
        };
        self.explain(&mut status, container, newest);
        if self.kind == ContainerKind::Regular {
            let devices = (self.input.devices)(&container.name);
            status.allocated_resources_status = Some(devices).filter(|devices| !devices.is_empty());
        }
        status
    }

    /// The complete old entry of a terminated container, otherwise one that waits for its first start.
    fn start_value(&self, container: &api::Container, old: Option<&api::ContainerStatus>) -> api::ContainerStatus {
        if let Some(ended) = old.filter(|o| exit(o).is_some()) {
            return ended.clone();
        }
        let has_init = !self.input.pod.init_containers().is_empty();
        let reason = if has_init { "PodInitializing" } else { "ContainerCreating" };
        api::ContainerStatus {
            name: container.name.clone(),
            image: container.image.clone().unwrap_or_default(),
            state: Some(waiting(reason, "")),
            last_state: Some(old.and_then(|o| o.last_state.clone()).unwrap_or_default()),
            restart_count: old.map_or(0, |o| o.restart_count),
            volume_mounts: volume_mounts(container, self.input.recursive_read_only),
            ..Default::default()
        }
    }

    /// Status of a container that the runtime does not know (spec 02b §3.2).
    fn missing(&self, start: api::ContainerStatus, old: Option<&api::ContainerStatus>) -> api::ContainerStatus {
        let mut status = start;
        let Some(old) = old else { return status };
        if self.restarting && state(old) != ContainerStateRef::Waiting {
            status.state = Some(waiting(RESTARTING_ALL, REMOVED_FOR_RESTART));
            status.last_state = Some(terminated(end_not_observed(RESTARTING_ALL, REMOVED_FOR_RESTART)));
            status.restart_count = old.restart_count.saturating_add(1);
        } else if state(old) == ContainerStateRef::Running && last_exit(old).is_none() {
            // Reports the container as stopped, not as waiting: the pod must not return to Pending.
            status.last_state = Some(terminated(end_not_observed(STATUS_UNKNOWN, LOST_WHILE_RUNNING)));
            if !self.input.pod.is_deleting() {
                status.restart_count = status.restart_count.saturating_add(1);
            }
        }
        status
    }

    /// Status from the newest instance (spec 02b §3.3).
    fn present(
        &self,
        instance: &ObservedContainer,
        container: &api::Container,
        start: api::ContainerStatus,
        old: Option<&api::ContainerStatus>,
    ) -> api::ContainerStatus {
        let mut status = api::ContainerStatus {
            name: container.name.clone(),
            image: instance.image.clone(),
            image_id: instance.image_ref.clone(),
            container_id: Some(self.full_id(instance)),
            state: Some(self.instance_state(instance, old)),
            last_state: Some(api::ContainerState::default()),
            restart_count: instance.restart_count,
            volume_mounts: start.volume_mounts,
            ..Default::default()
        };
        if let Some(old) = old {
            self.remember(&mut status, instance, old);
        }
        status.allocated_resources = container.resources.as_ref().and_then(|r| r.requests.clone());
        status.resources = Some(container_resources(container, instance, status.container_id.as_deref(), old));
        status.user = instance.user.as_ref().map(|user| api::ContainerUser {
            linux: Some(api::LinuxContainerUser {
                uid: user.uid,
                gid: user.gid,
                supplemental_groups: Some(user.supplemental_groups.clone()).filter(|g| !g.is_empty()),
            }),
        });
        status
    }

    /// Keeps values that the previous status has and the runtime does not.
    fn remember(&self, status: &mut api::ContainerStatus, instance: &ObservedContainer, old: &api::ContainerStatus) {
        let same = old.container_id == status.container_id;
        status.volume_mounts.clone_from(&old.volume_mounts);
        status.restart_count = status.restart_count.max(old.restart_count);
        if let Some(ended) = exit(old).filter(|_| !same).or_else(|| last_exit(old)) {
            status.last_state = Some(terminated(ended.clone()));
        }
        match instance.state {
            ContainerState::Running => {
                if exit(old).is_some() && old.restart_count >= instance.restart_count {
                    status.restart_count = old.restart_count.saturating_add(1);
                }
                // Another instance must pass its own startup probe.
                status.started = old.started.filter(|_| same);
            }
            ContainerState::Unknown if state(old) == ContainerStateRef::Running => {
                status.restart_count = old.restart_count.saturating_add(1);
            }
            _ => {}
        }
    }

    fn instance_state(&self, instance: &ObservedContainer, old: Option<&api::ContainerStatus>) -> api::ContainerState {
        match instance.state {
            ContainerState::Running => api::ContainerState {
                running: Some(api::ContainerStateRunning { started_at: instance.started_at.map(Into::into) }),
                ..Default::default()
            },
            ContainerState::Exited => terminated(api::ContainerStateTerminated {
                exit_code: instance.exit_code,
                reason: Some(instance.reason.clone()).filter(|r| !r.is_empty()),
                message: Some(instance.message.clone()).filter(|m| !m.is_empty()),
                started_at: instance.started_at.map(Into::into),
                finished_at: instance.finished_at.map(Into::into),
                container_id: Some(self.full_id(instance)),
                signal: None,
            }),
            ContainerState::Unknown if old.is_some_and(|o| state(o) == ContainerStateRef::Running) => {
                let reason = if self.restarting { RESTARTING_ALL } else { STATUS_UNKNOWN };
                terminated(end_not_observed(reason, LOST_AT_END))
            }
            ContainerState::Created | ContainerState::Unknown => waiting("", ""),
        }
    }

    /// Adds the reason why the container does not start (spec 02b §3.4).
    fn explain(
        &self,
        status: &mut api::ContainerStatus,
        container: &api::Container,
        newest: Option<&ObservedContainer>,
    ) {
        if self.kind == ContainerKind::Init {
            if newest.is_some_and(|c| c.state == ContainerState::Exited && c.exit_code == 0) {
                return;
            }
            let forgotten =
                newest.is_none() && !Pod::is_sidecar(container) && state(status) == ContainerStateRef::Waiting;
            if forgotten && self.any_regular_created() {
                status.state = Some(terminated(api::ContainerStateTerminated {
                    reason: Some("Completed".to_owned()),
                    message: Some(INIT_FORGOTTEN.to_owned()),
                    ..Default::default()
                }));
                return;
            }
        }
        if !should_start(self.input.pod, container, newest) {
            return;
        }
        if let Some(failure) = self.input.start_failures.get(&container.name) {
            if exit(status).is_some() {
                status.last_state = status.state.take();
            }
            status.state = Some(waiting(&failure.reason, &failure.message));
        }
    }

    fn any_regular_created(&self) -> bool {
        let created = |c: &&ObservedContainer| c.state != ContainerState::Unknown;
        self.input.pod.containers().iter().any(|c| self.input.observed.newest(&c.name).filter(created).is_some())
    }

    fn full_id(&self, instance: &ObservedContainer) -> String {
        format!("{}://{}", self.input.node.runtime_name, instance.id)
    }
}

/// Volume mounts of a container for its status.
fn volume_mounts(container: &api::Container, recursive: bool) -> Option<Vec<api::VolumeMountStatus>> {
    let mounts = container.volume_mounts.as_ref()?;
    let status = |mount: &api::VolumeMount| api::VolumeMountStatus {
        name: mount.name.clone(),
        mount_path: mount.mount_path.clone(),
        read_only: mount.read_only.filter(|r| *r),
        recursive_read_only: (mount.read_only == Some(true)).then(|| {
            let on = recursive && is_recursive(mount);
            if on { "Enabled" } else { "Disabled" }.to_owned()
        }),
        volume_status: None,
    };
    Some(mounts.iter().map(status).collect())
}

fn is_recursive(mount: &api::VolumeMount) -> bool {
    let private = mount.mount_propagation.as_deref().is_none_or(|p| p == "None");
    private && matches!(mount.recursive_read_only.as_deref(), Some("IfPossible" | "Enabled"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        StartFailure,
        fixture::{
            RuntimeState, StatusFixture, exited, instance, observed, pod, pod_with, running, status, waiting,
            waiting_after,
        },
        lookup::waiting_reason,
    };
    use berth_types::observation::ObservedPod;

    /// Status of container `c` (or the first of the pod), given the old entry and the instances.
    fn convert(world: &StatusFixture, old: Option<api::ContainerStatus>) -> api::ContainerStatus {
        convert_with(world, old, false)
    }

    fn convert_with(
        world: &StatusFixture,
        old: Option<api::ContainerStatus>,
        restarting: bool,
    ) -> api::ContainerStatus {
        let init = world.pod.init_containers().first();
        let kind = if init.is_some() { ContainerKind::Init } else { ContainerKind::Regular };
        let container = init.unwrap_or_else(|| &world.pod.containers()[0]);
        let old: Vec<_> = old.into_iter().collect();
        Conversion { input: &world.input(), kind, old: &old, restarting }.convert(container)
    }

    #[test]
    fn the_start_value_waits() {
        let world = StatusFixture::new(pod("Always", &["i", "c"]), observed(&[]));
        let status = convert(&world, None);
        assert_eq!(
            (status.name.as_str(), status.image.as_str(), waiting_reason(&status)),
            ("i", "img:i", Some("PodInitializing"))
        );
        let world = StatusFixture::new(pod("Always", &["c"]), observed(&[]));
        assert_eq!(waiting_reason(&convert(&world, None)), Some("ContainerCreating"));
    }

    #[test]
    fn absence_is_interpreted_by_the_previous_state() {
        let world = StatusFixture::new(pod("Always", &["c"]), observed(&[]));
        let ended = status("c", exited(3));
        assert_eq!(convert(&world, Some(ended.clone())), ended, "terminated is kept");

        let converted = convert(&world, Some(status("c", waiting_after(1))));
        assert_eq!(
            (waiting_reason(&converted), last_exit(&converted).map(|e| e.exit_code)),
            (Some("ContainerCreating"), Some(1))
        );

        // AC-02b-9
        let vanished = convert(&world, Some(status("c", running())));
        let last = last_exit(&vanished).expect("a last state");
        assert_eq!((last.exit_code, last.reason.as_deref(), vanished.restart_count), (137, Some(STATUS_UNKNOWN), 1));
        assert_eq!(last.message.as_deref(), Some(LOST_WHILE_RUNNING));

        let mut was_restarted = status("c", running());
        was_restarted.last_state = status("c", exited(2)).state;
        let again = convert(&world, Some(was_restarted));
        assert_eq!((last_exit(&again).map(|e| e.exit_code), again.restart_count), (Some(2), 0));

        let mut deleting = StatusFixture::new(pod("Always", &["c"]), observed(&[]));
        deleting.delete();
        assert_eq!(convert(&deleting, Some(status("c", running()))).restart_count, 0, "deleted: no restart");
    }

    #[test]
    fn absence_during_a_restart_of_all_is_part_of_it() {
        let world = StatusFixture::new(pod("Always", &["c"]), observed(&[]));
        for old in [running(), exited(42)] {
            let converted = convert_with(&world, Some(status("c", old)), true);
            let last = last_exit(&converted).expect("a last state");
            assert_eq!(
                (waiting_reason(&converted), last.exit_code, converted.restart_count),
                (Some(RESTARTING_ALL), 137, 1)
            );
        }
        let converted = convert_with(&world, Some(status("c", waiting())), true);
        assert_eq!(waiting_reason(&converted), Some("ContainerCreating"));
    }

    #[test]
    fn each_runtime_state_has_an_api_state() {
        for (seen, old, expected) in [
            (RuntimeState::Running, None, "running"),
            (RuntimeState::Created, None, "waiting"),
            (RuntimeState::Exited(7), None, "terminated"),
            (RuntimeState::Unknown, Some(running()), "terminated"),
            (RuntimeState::Unknown, Some(waiting()), "waiting"),
            (RuntimeState::Unknown, None, "waiting"),
        ] {
            let world = StatusFixture::new(pod("Never", &["c"]), observed(&[("c", seen)]));
            let converted = convert(&world, old.map(|o| status("c", o)));
            let json = serde_json::to_value(&converted.state).expect("JSON");
            assert!(json.get(expected).is_some(), "{seen:?}: {json}");
            assert_eq!(converted.container_id.as_deref(), Some("containerd://c-0"));
            assert_eq!(converted.image_id, "ref:c");
        }
        let world = StatusFixture::new(pod("Never", &["c"]), observed(&[("c", RuntimeState::Unknown)]));
        let converted = convert(&world, Some(api::ContainerStatus { restart_count: 4, ..status("c", running()) }));
        assert_eq!((exit(&converted).map(|e| e.exit_code), converted.restart_count), (Some(137), 5));
    }

    #[test]
    fn the_instance_before_is_the_last_state() {
        let mut seen = ObservedPod {
            containers: vec![
                instance("c", 0, RuntimeState::Exited(9)),
                instance("c", 2, RuntimeState::Running),
                instance("c", 1, RuntimeState::Exited(5)),
            ],
            ..observed(&[])
        };
        seen.sort();
        let converted = convert(&StatusFixture::new(pod("Always", &["c"]), seen), Some(status("c", waiting_after(1))));
        assert_eq!(
            (state(&converted), last_exit(&converted).map(|e| e.exit_code)),
            (ContainerStateRef::Running, Some(5))
        );
        assert_eq!((converted.restart_count, converted.container_id.as_deref()), (2, Some("containerd://c-2")));
    }

    #[test]
    fn the_restart_count_and_last_state_survive_removed_instances() {
        let world = StatusFixture::new(pod("Always", &["c"]), observed(&[("c", RuntimeState::Running)]));
        let mut ended = api::ContainerStatus { restart_count: 3, ..status("c", exited(1)) };
        ended.container_id = Some("containerd://older".to_owned());
        let converted = convert(&world, Some(ended));
        assert_eq!((converted.restart_count, last_exit(&converted).map(|e| e.exit_code)), (4, Some(1)));
        let again = convert(&world, Some(converted.clone()));
        assert_eq!(again, converted, "converted once");
    }

    #[test]
    fn started_is_carried_over_for_the_same_instance_only() {
        let world = StatusFixture::new(pod("Always", &["c"]), observed(&[("c", RuntimeState::Running)]));
        for (id, carried) in [("containerd://c-0", Some(true)), ("containerd://older", None)] {
            let mut old = api::ContainerStatus { started: Some(true), ..status("c", running()) };
            old.container_id = Some(id.to_owned());
            assert_eq!(convert(&world, Some(old)).started, carried, "{id}");
        }
    }

    #[test]
    fn a_failure_to_start_is_the_reason_to_wait() {
        let failure = |reason: &str| StartFailure { reason: reason.to_owned(), message: "why".to_owned() };
        for (case, policy, seen, expected, last) in [
            ("AC-02b-2", "Always", vec![("c", RuntimeState::Exited(1))], Some("Broken"), Some(1)),
            ("not restarted", "Never", vec![("c", RuntimeState::Exited(1))], None, None),
            ("never seen", "Never", vec![], Some("Broken"), None),
            ("created", "Never", vec![("c", RuntimeState::Created)], Some("Broken"), None),
            ("running", "Always", vec![("c", RuntimeState::Running)], None, None),
        ] {
            let mut world = StatusFixture::new(pod(policy, &["c"]), observed(&seen));
            world.failures = BTreeMap::from([("c".to_owned(), failure("Broken"))]);
            let converted = convert(&world, None);
            assert_eq!(
                (waiting_reason(&converted), last_exit(&converted).map(|e| e.exit_code)),
                (expected, last),
                "{case}"
            );
        }
        let mut world = StatusFixture::new(pod("Always", &["i", "c"]), observed(&[("i", RuntimeState::Exited(0))]));
        world.failures = BTreeMap::from([("i".to_owned(), failure("Broken"))]);
        assert_eq!(exit(&convert(&world, None)).map(|e| e.exit_code), Some(0), "an init container that is done");
    }

    #[test]
    fn a_forgotten_init_container_counts_as_done() {
        let world = StatusFixture::new(pod("Always", &["i", "c"]), observed(&[("c", RuntimeState::Created)]));
        let converted = convert(&world, Some(status("i", waiting())));
        let exit = exit(&converted).expect("terminated");
        assert_eq!(
            (exit.exit_code, exit.reason.as_deref(), exit.message.as_deref()),
            (0, Some("Completed"), Some(INIT_FORGOTTEN))
        );
        let sidecar = StatusFixture::new(pod("Always", &["s", "c"]), observed(&[("c", RuntimeState::Running)]));
        assert_eq!(waiting_reason(&convert(&sidecar, None)), Some("PodInitializing"));
    }

    #[test]
    fn mounts_show_whether_they_are_recursively_read_only() {
        let pod = pod_with(serde_json::json!({"containers": [{"name": "c", "volumeMounts": [
            {"name": "a", "mountPath": "/a"},
            {"name": "b", "mountPath": "/b", "readOnly": true},
            {"name": "c", "mountPath": "/c", "readOnly": true, "recursiveReadOnly": "IfPossible"},
            {"name": "d", "mountPath": "/d", "readOnly": true, "recursiveReadOnly": "Enabled", "mountPropagation": "Bidirectional"},
        ]}]}));
        let mut world = StatusFixture::new(pod, observed(&[]));
        let modes = |world: &StatusFixture| -> Vec<Option<String>> {
            convert(world, None).volume_mounts.into_iter().flatten().map(|m| m.recursive_read_only).collect()
        };
        let (on, off) = (Some("Enabled".to_owned()), Some("Disabled".to_owned()));
        assert_eq!(modes(&world), [None, off.clone(), off.clone(), off.clone()]);
        world.recursive = true;
        assert_eq!(modes(&world), [None, off.clone(), on, off]);
    }
}
