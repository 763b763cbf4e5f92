//! Shutdown classes: groups pods by priority, with grace periods. Pure. Implements spec 05 §7.1, §7.4.

use std::{sync::Arc, time::Duration};

use berth_config::fields::KubeletConfiguration;
use berth_types::Pod;

/// Minimum priority of critical pods.
const CRITICAL: i32 = 2_000_000_000;

/// A shutdown class: pods of this priority and above, up to the next class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShutdownClass {
    /// Minimum priority of the class.
    pub priority: i32,
    /// Shutdown grace period of the class.
    pub period: Duration,
}

/// Time limits of one pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PodTimeLimits {
    /// Grace period of the pod in whole seconds.
    pub grace: i64,
    /// Part of the grace period reserved for publishing the final status, if the pod uses the whole
    /// period of its class.
    pub words: Duration,
}

/// Minimum reserve for final statuses, and the addition per pod: API requests per second are limited.
const WORDS: Duration = Duration::from_millis(300);
const WORD: Duration = Duration::from_millis(7);

impl ShutdownClass {
    /// Time limits of one pod of this class; `pods` is the number of pods terminated together.
    pub fn given(&self, pod: &Pod, pods: usize) -> PodTimeLimits {
        let period = i64::try_from(self.period.as_secs()).unwrap_or(i64::MAX);
        let own = pod.spec().termination_grace_period_seconds;
        let grace = own.map_or(period, |own| own.min(period)).max(0);
        let words = (WORDS + WORD.saturating_mul(u32::try_from(pods).unwrap_or(u32::MAX))).min(self.period / 4);
        PodTimeLimits { grace, words: if grace == period { words } else { Duration::ZERO } }
    }
}

/// All classes, lowest priority first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShutdownPlan(Vec<ShutdownClass>);

impl ShutdownPlan {
    /// Builds the plan from the configuration; `None` if shutdown does not wait for pods.
    pub fn of(config: &KubeletConfiguration) -> Option<Self> {
        let mut classes: Vec<ShutdownClass> = config
            .shutdown_grace_period_by_pod_priority
            .iter()
            .map(|band| {
                let seconds = u64::try_from(band.shutdown_grace_period_seconds).unwrap_or(0);
                ShutdownClass { priority: band.priority, period: Duration::from_secs(seconds) }
            })
            .collect();
        if classes.is_empty() {
            let total = config.shutdown_grace_period.std();
            let critical = config.shutdown_grace_period_critical_pods.std().min(total);
            classes.push(ShutdownClass { priority: 0, period: total - critical });
            classes.push(ShutdownClass { priority: CRITICAL, period: critical });
        }
        classes.sort_by_key(|class| class.priority);
        let plan = Self(classes);
        (!plan.total().is_zero()).then_some(plan)
    }

    /// Total of all grace periods.
    pub fn total(&self) -> Duration {
        self.0.iter().map(|class| class.period).sum()
    }

    /// Shortest nonzero grace period of a class.
    pub fn shortest(&self) -> Duration {
        self.0.iter().map(|class| class.period).filter(|period| !period.is_zero()).min().unwrap_or_default()
    }

    /// The pods of each nonempty class, in shutdown order.
    pub fn groups(&self, pods: &[Arc<Pod>]) -> Vec<(ShutdownClass, Vec<Arc<Pod>>)> {
        let class_of = |pod: &Pod| {
            let priority = pod.spec().priority.unwrap_or(0);
            self.0.iter().rposition(|class| class.priority <= priority).unwrap_or(0)
        };
        let of = |(at, class): (usize, &ShutdownClass)| {
            let members: Vec<_> = pods.iter().filter(|pod| class_of(pod) == at).cloned().collect();
            (!members.is_empty()).then_some((*class, members))
        };
        self.0.iter().enumerate().filter_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn config(fields: &Value) -> KubeletConfiguration {
        serde_json::from_value(fields.clone()).expect("fields")
    }

    fn pod(name: &str, priority: Option<i32>, grace: Option<i64>) -> Arc<Pod> {
        let object = json!({
            "metadata": {"name": name, "namespace": "n", "uid": name},
            "spec": {"containers": [], "priority": priority, "terminationGracePeriodSeconds": grace},
        });
        Arc::new(Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete"))
    }

    /// `period: name=grace` of each nonempty class; `!` if the pod uses the whole period of its class.
    fn groups(fields: &Value, pods: &[Arc<Pod>]) -> Vec<String> {
        let plan = ShutdownPlan::of(&config(fields)).expect("a plan");
        let shown = |(class, pods): (ShutdownClass, Vec<Arc<Pod>>)| {
            let named = |pod: &Arc<Pod>| {
                let PodTimeLimits { grace, words } = class.given(pod, 1);
                format!("{}={grace}{}", pod.name(), if words.is_zero() { "" } else { "!" })
            };
            let pods: Vec<_> = pods.iter().map(named).collect();
            format!("{}: {}", class.period.as_secs(), pods.join(" "))
        };
        plan.groups(pods).into_iter().map(shown).collect()
    }

    #[test]
    fn two_periods_are_two_classes() {
        // AC-05-29
        let pods = [
            pod("none", None, Some(30)),
            pod("critical", Some(CRITICAL), Some(600)),
            pod("below", Some(-5), Some(5)),
            pod("node", Some(CRITICAL + 1000), None),
        ];
        let fields = json!({"shutdownGracePeriod": "30s", "shutdownGracePeriodCriticalPods": "10s"});
        assert_eq!(groups(&fields, &pods), ["20: none=20! below=5", "10: critical=10! node=10!"]);
        let all_critical = json!({"shutdownGracePeriod": "10s", "shutdownGracePeriodCriticalPods": "10s"});
        assert_eq!(groups(&all_critical, &pods), ["0: none=0 below=0", "10: critical=10! node=10!"]);
        assert_eq!(groups(&fields, &pods[1..2]), ["10: critical=10!"], "an empty class is skipped");
        assert_eq!(ShutdownPlan::of(&config(&json!({}))), None);
    }

    #[test]
    fn last_words_of_many_take_longer_and_never_most_of_the_time() {
        let words = |period, pods| {
            ShutdownClass { priority: 0, period: Duration::from_secs(period) }.given(&pod("p", None, None), pods).words
        };
        for (period, pods, expected) in [
            (20, 1, 307),
            (20, 100, 1000),
            (8, 100, 1000),
            (8, 500, 2000),
            (1, 1, 250),
            (0, 1, 0),
            (20, usize::MAX, 5000),
        ] {
            assert_eq!(words(period, pods), Duration::from_millis(expected), "{period} {pods}");
        }
    }

    #[test]
    fn a_pod_is_of_the_highest_class_it_reaches() {
        let fields = json!({"shutdownGracePeriodByPodPriority": [
            {"priority": 1000, "shutdownGracePeriodSeconds": 180},
            {"priority": 100_000, "shutdownGracePeriodSeconds": 10},
            {"priority": 10, "shutdownGracePeriodSeconds": 60},
        ]});
        let pods = [
            pod("high", Some(100_001), Some(1)),
            pod("just", Some(1000), None),
            pod("under", Some(999), None),
            pod("lowest", Some(-1), None),
        ];
        assert_eq!(groups(&fields, &pods), ["60: under=60! lowest=60!", "180: just=180!", "10: high=1"]);
        assert_eq!(ShutdownPlan::of(&config(&fields)).expect("a plan").total(), Duration::from_secs(250));
    }
}
