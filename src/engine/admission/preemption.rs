//! Critical pod preemption: selects the victims that must be killed for a critical pod to fit.
//!
//! Pure. Implements spec 02a §6.3, 06 §7.

use std::sync::Arc;

use crate::engine::allocation::resource_fit::Insufficient;
use berth_types::{
    Pod,
    qos::Qos,
    resources::{Amounts, CPU, MEMORY, Overhead, PODS, amount_of, pod_requests, units},
};

/// Reason of the victim's event and status.
pub const REASON: &str = "Preempting";
/// Message of the victim's event and status.
pub const MESSAGE: &str = "Preempted in order to admit critical pod";
/// Reason of the victim's condition `DisruptionTarget`.
pub const CONDITION_REASON: &str = "TerminationByKubelet";
/// Message of the victim's condition `DisruptionTarget`.
pub const CONDITION_MESSAGE: &str = "Pod was preempted by Kubelet to accommodate a critical pod.";

/// All preemptable pods together do not free enough resources.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("error finding a set of pods to preempt: no set of running pods found to reclaim resources: {unmet}")]
pub struct NotEnough {
    /// The unmet requirements in upstream's format: `[(res: cpu, q: 50), ]`.
    unmet: String,
}

/// Selects the pods to preempt, in kill order: BestEffort, Burstable, Guaranteed. Chooses as few and as
/// small pods as the distance rule finds; a better QoS class only for what worse classes cannot free.
///
/// # Errors
/// All candidates together do not free what is needed.
pub fn victims(pod: &Pod, candidates: &[Arc<Pod>], short: &[Insufficient]) -> Result<Vec<Arc<Pod>>, NotEnough> {
    let needs = Needs(short.iter().map(|s| (s.resource.clone(), s.missing())).filter(|(_, need)| *need > 0).collect());
    let class = |qos: Qos| -> Vec<Candidate<'_>> {
        let preemptable = candidates.iter().filter(|c| may_preempt(pod, c) && Qos::of(c) == qos);
        preemptable.map(Candidate::new).collect()
    };
    let (best_effort, burstable, guaranteed) = (class(Qos::BestEffort), class(Qos::Burstable), class(Qos::Guaranteed));
    let unmet = needs.without(best_effort.iter().chain(&burstable).chain(&guaranteed));
    if !unmet.0.is_empty() {
        return Err(unmet.error());
    }
    let from_guaranteed = nearest(guaranteed, needs.without(best_effort.iter().chain(&burstable)))?;
    let from_burstable = nearest(burstable, needs.without(best_effort.iter().chain(&from_guaranteed)))?;
    let from_best_effort = nearest(best_effort, needs.without(from_burstable.iter().chain(&from_guaranteed)))?;
    let all = from_best_effort.into_iter().chain(from_burstable).chain(from_guaranteed);
    Ok(all.map(|c| c.pod.clone()).collect())
}

/// Whether `pod` may preempt `victim`: it is critical and the victim is not, or has the higher
/// priority.
pub fn may_preempt(pod: &Pod, victim: &Pod) -> bool {
    if pod.is_critical() && !victim.is_critical() {
        return true;
    }
    matches!((pod.spec().priority, victim.spec().priority), (Some(own), Some(other)) if own > other)
}

/// A preemptable pod with the requests that its end would free.
#[derive(Clone)]
struct Candidate<'a> {
    pod: &'a Arc<Pod>,
    requests: Amounts,
}

impl<'a> Candidate<'a> {
    fn new(pod: &'a Arc<Pod>) -> Self {
        Self { pod, requests: pod_requests(pod.spec(), Overhead::Included) }
    }

    fn frees(&self, resource: &str) -> i64 {
        if resource == PODS { 1 } else { units(resource, amount_of(&self.requests, resource)) }
    }

    /// Orders by memory, then by CPU; equal sizes count as smaller.
    fn is_smaller(&self, other: &Self) -> bool {
        let size = |c: &Self| (c.frees(MEMORY), c.frees(CPU));
        size(self) <= size(other)
    }
}

/// Unmet requirements by resource; only amounts above zero.
struct Needs(Vec<(String, i64)>);

impl Needs {
    fn without<'a, 'c: 'a>(&self, gone: impl Iterator<Item = &'a Candidate<'c>> + Clone) -> Self {
        let rest = |name: &str, need: i64| gone.clone().fold(need, |left, c| left.saturating_sub(c.frees(name)));
        let left = self.0.iter().map(|(name, need)| (name.clone(), rest(name, *need)));
        Self(left.filter(|(_, need)| *need > 0).collect())
    }

    /// Distance between a pod's requests and the unmet requirements: 0 where the pod frees all of them,
    /// plus 1 for each resource of which it frees nothing.
    fn distance(&self, candidate: &Candidate<'_>) -> f64 {
        let share = |(name, need): &(String, i64)| {
            let remaining = need.saturating_sub(candidate.frees(name)).max(0);
            (remaining as f64 / *need as f64).powi(2)
        };
        self.0.iter().map(share).sum()
    }

    fn error(&self) -> NotEnough {
        let items: String = self.0.iter().map(|(name, need)| format!("(res: {name}, q: {need}), ")).collect();
        NotEnough { unmet: format!("[{items}]") }
    }
}

/// Takes the nearest pod repeatedly until every requirement is met.
fn nearest<'a>(mut pods: Vec<Candidate<'a>>, mut needs: Needs) -> Result<Vec<Candidate<'a>>, NotEnough> {
    let mut chosen = Vec::new();
    while !needs.0.is_empty() {
        let mut best: Option<(usize, f64)> = None;
        for (i, candidate) in pods.iter().enumerate() {
            let distance = needs.distance(candidate);
            let is_better = best.is_none_or(|(b, least)| {
                distance < least || (distance == least && pods.get(b).is_some_and(|other| candidate.is_smaller(other)))
            });
            if is_better {
                best = Some((i, distance));
            }
        }
        let Some((index, _)) = best else { return Err(needs.error()) };
        // `swap_remove` as upstream does: the resulting order decides later ties.
        let taken = pods.swap_remove(index);
        needs = needs.without(std::iter::once(&taken));
        chosen.push(taken);
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn pod(name: &str, qos: Qos, milli: i64, priority: Option<i32>) -> Arc<Pod> {
        let cpu = format!("{milli}m");
        let resources = match qos {
            Qos::BestEffort => json!({}),
            Qos::Burstable => json!({"requests": {"cpu": cpu, "memory": "1"}}),
            Qos::Guaranteed => {
                json!({"requests": {"cpu": cpu, "memory": "1"}, "limits": {"cpu": cpu, "memory": "1"}})
            }
        };
        let object = json!({"metadata": {"name": name, "namespace": "n", "uid": name},
            "spec": {"priority": priority, "containers": [{"name": "c", "resources": resources}]}});
        Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
    }

    fn need(resource: &str, missing: i64) -> Insufficient {
        Insufficient { resource: resource.to_owned(), requested: missing, used: 0, capacity: 0 }
    }

    const CRITICAL: Option<i32> = Some(2_000_000_000);

    fn chosen(candidates: &[Arc<Pod>], short: &[Insufficient]) -> Result<Vec<String>, String> {
        let found = victims(&pod("critical", Qos::BestEffort, 0, CRITICAL), candidates, short);
        found.map(|v| v.iter().map(|p| p.name().to_owned()).collect()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_least_that_suffices_goes() {
        use Qos::{BestEffort, Burstable, Guaranteed};
        let (b100, b300) = (pod("b100", Burstable, 100, None), pod("b300", Burstable, 300, None));
        let (be, g100) = (pod("be", BestEffort, 0, None), pod("g100", Guaranteed, 100, None));
        let names = |list: &[&str]| Ok(list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        // AC-02a-14
        assert_eq!(chosen(&[b300.clone(), b100.clone()], &[need("cpu", 100)]), names(&["b100"]));
        // AC-06-15
        assert_eq!(chosen(&[be.clone(), b100.clone(), g100.clone()], &[need("cpu", 100)]), names(&["b100"]));
        assert_eq!(chosen(&[be.clone(), b100.clone(), g100.clone()], &[need("cpu", 200)]), names(&["b100", "g100"]));
        assert_eq!(chosen(&[be.clone(), b100.clone()], &[need("pods", 1)]), names(&["be"]));
        assert_eq!(chosen(&[b100, b300], &[need("cpu", 350)]), names(&["b300", "b100"]));
        let unmet = "error finding a set of pods to preempt: no set of running pods found to reclaim resources: [(res: cpu, q: 50), ]";
        assert_eq!(chosen(&[g100, be], &[need("cpu", 150)]), Err(unmet.to_owned()));
    }

    #[test]
    fn equals_and_betters_stay() {
        let low = pod("low", Qos::Burstable, 100, Some(0));
        let cluster = pod("cluster", Qos::Burstable, 100, CRITICAL);
        let node = pod("node", Qos::Burstable, 100, Some(2_000_001_000));
        let unset = pod("unset", Qos::Burstable, 100, None);
        for (own, victim, may) in [
            (&cluster, &low, true),
            (&cluster, &unset, true),
            (&node, &cluster, true),
            (&cluster, &node, false), // AC-06-17
            (&cluster, &cluster, false),
            (&unset, &low, false),
        ] {
            assert_eq!(may_preempt(own, victim), may, "{} {}", own.name(), victim.name());
        }
    }

    proptest! {
        #[test]
        fn victims_cover_the_need_and_none_is_spare(
            list in prop::collection::vec((0_u8..3, 0_i64..500), 0..8), missing in 1_i64..1500,
        ) {
            let class = |c: u8| [Qos::BestEffort, Qos::Burstable, Qos::Guaranteed][usize::from(c)];
            let candidates: Vec<_> =
                list.iter().enumerate().map(|(i, (c, m))| pod(&format!("p{i}"), class(*c), (*m).max(1), None)).collect();
            let cpu = |p: &Arc<Pod>| Candidate::new(p).frees(CPU);
            let all: i64 = candidates.iter().map(cpu).sum();
            let critical = pod("critical", Qos::BestEffort, 0, CRITICAL);
            match victims(&critical, &candidates, &[need(CPU, missing)]) {
                Err(_) => prop_assert!(all < missing),
                Ok(chosen) => {
                    let freed: i64 = chosen.iter().map(cpu).sum();
                    prop_assert!(freed >= missing);
                    prop_assert!(chosen.iter().all(|p| freed - cpu(p) < missing), "each one is needed");
                    let worse: i64 = candidates.iter().filter(|p| Qos::of(p) != Qos::Guaranteed).map(cpu).sum();
                    let any_guaranteed = chosen.iter().any(|p| Qos::of(p) == Qos::Guaranteed);
                    prop_assert_eq!(any_guaranteed, worse < missing, "better classes only where worse ones fall short");
                    let order: Vec<_> = chosen.iter().map(|p| Qos::of(p)).collect();
                    prop_assert!(order.is_sorted());
                }
            }
        }
    }
}
