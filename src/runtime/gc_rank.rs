//! Selects the dead containers and sandboxes that garbage collection removes. Pure.
//!
//! Of one name the higher attempt is the newer one, whatever the clock was at its creation.
//!
//! Implements spec 03a §11, 02a §9.8.

use std::collections::{BTreeMap, HashMap, HashSet};

use jiff::{SignedDuration, Timestamp};

use berth_types::{
    ContainerId, PodUid, SandboxId,
    observation::{ContainerState, ObservedPod},
};

/// Limits of retained dead containers (`minimumGCAge`, `maxPerPodContainer`, `maxContainerCount`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GcPolicy {
    /// Minimum age of a removed container.
    pub min_age: SignedDuration,
    /// Maximum retained per pod and container name; negative for no limit.
    pub max_per_container: i32,
    /// Maximum retained on the node; negative for no limit.
    pub max_total: i32,
}

impl Default for GcPolicy {
    fn default() -> Self {
        Self { min_age: SignedDuration::ZERO, max_per_container: 1, max_total: -1 }
    }
}

/// A container from the runtime's list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedContainer {
    /// ID of the instance.
    pub id: ContainerId,
    /// UID of its pod.
    pub pod: PodUid,
    /// Name of the container.
    pub name: String,
    /// The sandbox it belongs to.
    pub sandbox: SandboxId,
    /// State of the container.
    pub state: ContainerState,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// Creation time.
    pub created_at: Timestamp,
}

/// A sandbox from the runtime's list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedSandbox {
    /// The runtime's ID.
    pub id: SandboxId,
    /// UID of its pod.
    pub pod: PodUid,
    /// Whether the sandbox is ready.
    pub ready: bool,
    /// `metadata.attempt`.
    pub attempt: u32,
    /// Creation time.
    pub created_at: Timestamp,
}

/// Containers to remove, including those of unknown state, which must be killed first.
///
/// `may_go` returns whether all containers of a pod may be removed; it must return `false` while
/// sources are not ready. The newest instance of a container that is created but not started is about
/// to run: it is kept and not counted; otherwise the instance before it, whose exit the pod's status
/// shows, would be removed instead.
pub fn containers(
    all: &[ListedContainer],
    policy: GcPolicy,
    now: Timestamp,
    may_go: impl Fn(&PodUid) -> bool,
) -> Vec<&ListedContainer> {
    let mut groups: BTreeMap<(&PodUid, &str), Vec<&ListedContainer>> = BTreeMap::new();
    for c in all {
        // A creation time in the future dates from before the clock was set back.
        let age = now.duration_since(c.created_at);
        let old = age >= policy.min_age || age.is_negative();
        if c.state != ContainerState::Running && old {
            groups.entry((&c.pod, &c.name)).or_default().push(c);
        }
    }
    let mut doomed = Vec::new();
    groups.retain(|(pod, _), members| {
        let age = |c: &ListedContainer| (c.attempt, c.created_at);
        members.sort_by(|a, b| age(b).cmp(&age(a)).then_with(|| a.id.cmp(&b.id)));
        if may_go(pod) {
            doomed.append(members);
            return false;
        }
        if members.first().is_some_and(|newest| newest.state == ContainerState::Created) {
            members.remove(0);
        }
        if let Ok(keep) = usize::try_from(policy.max_per_container) {
            doomed.extend(members.drain(keep.min(members.len())..));
        }
        !members.is_empty()
    });
    if let Ok(limit) = usize::try_from(policy.max_total) {
        over_total(groups, limit, &mut doomed);
    }
    doomed
}

/// Keeps at least one per group first, then removes the oldest overall.
fn over_total<'a>(
    mut groups: BTreeMap<(&PodUid, &str), Vec<&'a ListedContainer>>,
    limit: usize,
    doomed: &mut Vec<&'a ListedContainer>,
) {
    let total: usize = groups.values().map(Vec::len).sum();
    if total <= limit {
        return;
    }
    let keep = (limit / groups.len().max(1)).max(1);
    for members in groups.values_mut() {
        doomed.extend(members.drain(keep.min(members.len())..));
    }
    let mut rest: Vec<&ListedContainer> = groups.into_values().flatten().collect();
    rest.sort_by(|a, b| b.created_at.cmp(&a.created_at).then_with(|| a.id.cmp(&b.id)));
    doomed.extend(rest.drain(limit.min(rest.len())..));
}

/// Sandboxes to remove: inactive ones, except the newest of a pod whose content is kept. A sandbox is
/// active if it is ready or has containers.
pub fn sandboxes<'a>(
    all: &'a [ListedSandbox],
    containers: &[ListedContainer],
    may_go: impl Fn(&PodUid) -> bool,
) -> Vec<&'a ListedSandbox> {
    let used: HashSet<&SandboxId> = containers.iter().map(|c| &c.sandbox).collect();
    let mut newest: HashMap<&PodUid, &ListedSandbox> = HashMap::new();
    for sandbox in all {
        let known = newest.entry(&sandbox.pod).or_insert(sandbox);
        let age = |s: &ListedSandbox| (s.attempt, s.created_at);
        if (age(known), &sandbox.id) < (age(sandbox), &known.id) {
            *known = sandbox;
        }
    }
    all.iter()
        .filter(|s| !s.ready && !used.contains(&s.id))
        .filter(|s| may_go(&s.pod) || newest.get(&s.pod).is_some_and(|n| n.id != s.id))
        .collect()
}

/// Dead instances of a pod to remove after one of its containers died: those beyond the `keep` newest
/// per container, or all of the pod.
pub fn dead_instances(observed: &ObservedPod, container: Option<&str>, keep: usize, all: bool) -> Vec<ContainerId> {
    let exited = |c: &&berth_types::observation::ObservedContainer| c.state == ContainerState::Exited;
    if all {
        return observed.containers.iter().filter(exited).map(|c| c.id.clone()).collect();
    }
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut doomed = Vec::new();
    for c in observed.containers.iter().filter(exited) {
        if container.is_some_and(|name| *name != *c.name) {
            continue;
        }
        let count = seen.entry(&c.name).or_default();
        *count += 1;
        if *count > keep {
            doomed.push(c.id.clone());
        }
    }
    doomed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + seconds).expect("in range")
    }

    fn dead(id: &str, pod: &str, name: &str, created: i64) -> ListedContainer {
        ListedContainer {
            id: id.into(),
            pod: pod.into(),
            name: name.to_owned(),
            sandbox: format!("s-{pod}").into(),
            state: ContainerState::Exited,
            attempt: 0,
            created_at: at(created),
        }
    }

    fn removed(all: &[ListedContainer], policy: GcPolicy, gone: &[&str]) -> Vec<String> {
        let doomed = containers(all, policy, at(100), |pod| gone.contains(&pod.as_str()));
        doomed.iter().map(|c| c.id.to_string()).collect()
    }

    #[test]
    fn the_newest_dead_instance_of_each_container_stays() {
        let mut all = vec![dead("a1", "p", "a", 1), dead("a2", "p", "a", 2), dead("b1", "p", "b", 1)];
        assert_eq!(removed(&all, GcPolicy::default(), &[]), ["a1"]);
        assert_eq!(removed(&all, GcPolicy { max_per_container: 0, ..GcPolicy::default() }, &[]), ["a2", "a1", "b1"]);
        assert!(removed(&all, GcPolicy { max_per_container: -1, ..GcPolicy::default() }, &[]).is_empty());
        assert_eq!(removed(&all, GcPolicy::default(), &["p"]), ["a2", "a1", "b1"]);
        let old = GcPolicy { min_age: SignedDuration::from_secs(99), ..GcPolicy::default() };
        assert!(removed(&all, old, &[]).is_empty(), "a2 is too young to count");
        all[0].attempt = 1;
        assert_eq!(removed(&all, GcPolicy::default(), &[]), ["a2"], "the clock was set back");
        let yet_to_come = [dead("a1", "p", "a", 200), dead("a2", "p", "a", 201)];
        assert_eq!(removed(&yet_to_come, old, &["p"]), ["a2", "a1"], "so it was since");
        all[0].state = ContainerState::Running;
        assert!(removed(&all, GcPolicy::default(), &[]).is_empty());
    }

    #[test]
    fn an_instance_that_is_about_to_start_does_not_count() {
        let made =
            |id: &str, created: i64| ListedContainer { state: ContainerState::Created, ..dead(id, "p", "a", created) };
        let all = [dead("a1", "p", "a", 1), dead("a2", "p", "a", 2), made("a3", 3)];
        assert_eq!(removed(&all, GcPolicy::default(), &[]), ["a1"]);
        assert_eq!(removed(&all, GcPolicy { max_per_container: 0, ..GcPolicy::default() }, &[]), ["a2", "a1"]);
        assert_eq!(removed(&all, GcPolicy { max_total: 0, ..GcPolicy::default() }, &[]), ["a1", "a2"]);
        assert_eq!(removed(&all, GcPolicy::default(), &["p"]), ["a3", "a2", "a1"], "but goes with its pod");
        let never = [made("a1", 1), dead("a2", "p", "a", 2), made("a3", 3)];
        assert_eq!(removed(&never, GcPolicy::default(), &[]), ["a1"], "an older one was never started");
    }

    #[test]
    fn over_the_total_each_keeps_its_share_and_then_the_oldest_go() {
        let all = [
            dead("a1", "p", "a", 1),
            dead("a2", "p", "a", 2),
            dead("a3", "p", "a", 6),
            dead("b1", "p", "b", 3),
            dead("c1", "q", "c", 4),
        ];
        let policy = GcPolicy { max_per_container: -1, max_total: 2, ..GcPolicy::default() };
        assert_eq!(removed(&all, policy, &[]), ["a2", "a1", "b1"]);
        assert!(removed(&all, GcPolicy { max_total: 5, ..policy }, &[]).is_empty());
        assert_eq!(removed(&all, GcPolicy { max_total: 0, ..policy }, &[]).len(), 5);
    }

    fn sandbox(id: &str, ready: bool, created: i64) -> ListedSandbox {
        ListedSandbox { id: id.into(), pod: "p".into(), ready, attempt: 0, created_at: at(created) }
    }

    #[test]
    fn of_a_living_pod_the_newest_sandbox_stays() {
        let names = |all: &[ListedSandbox], used: &[ListedContainer], gone: bool| -> Vec<String> {
            sandboxes(all, used, |_| gone).iter().map(|s| s.id.to_string()).collect()
        };
        // AC-03a-25
        let two = [sandbox("old", false, 1), sandbox("new", false, 2)];
        assert_eq!(names(&two, &[], false), ["old"]);
        let set_back = [sandbox("old", false, 2), ListedSandbox { attempt: 1, ..sandbox("new", false, 1) }];
        assert_eq!(names(&set_back, &[], false), ["old"]);
        assert_eq!(names(&two, &[], true), ["old", "new"]);
        let mut inside = dead("c", "p", "c", 1);
        inside.sandbox = "old".into();
        assert!(names(&two, &[inside], false).is_empty());
        assert!(names(&[sandbox("old", false, 1)], &[], false).is_empty());
        assert_eq!(names(&[sandbox("old", false, 1), sandbox("new", true, 2)], &[], true), ["old"]);
    }
}
