//! Resource fit: whether a pod's requests fit into the node's allocatable resources.
//!
//! Pure. Implements spec 02a §6.2.

use std::collections::BTreeMap;

use berth_types::{
    Pod,
    quantity::Amount,
    resources::{
        Amounts, CPU, EPHEMERAL_STORAGE, MEMORY, PODS, View, add, amount_of, is_extended, is_hugepage, requests, units,
    },
};

/// An insufficient resource. Amounts are milli-CPU for CPU, base units for all other resources.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Insufficient {
    /// Name of the resource.
    pub resource: String,
    /// Amount that the pod requests.
    pub requested: i64,
    /// Amount that the other pods request.
    pub used: i64,
    /// Allocatable amount of the node.
    pub capacity: i64,
}

impl Insufficient {
    /// Additional amount that would have to be free.
    pub fn missing(&self) -> i64 {
        self.requested.saturating_sub(self.capacity.saturating_sub(self.used))
    }
}

/// The insufficient resources, in the order pods, CPU, memory, ephemeral-storage, others by name.
///
/// Extended resources that the node does not list belong to the cluster and are not checked; extended
/// resources that DRA claims provide are not checked either.
pub fn insufficient<'a>(
    pod: &Pod,
    others: impl Iterator<Item = &'a Pod>,
    allocatable: &BTreeMap<String, String>,
) -> Vec<Insufficient> {
    let capacity = |name: &str| {
        let amount = allocatable.get(name).and_then(|text| Amount::parse(text).ok());
        amount.map_or(0, |amount| units(name, amount))
    };
    let (mut count, mut used) = (0_i64, Amounts::new());
    for other in others {
        count += 1;
        add(&mut used, &requests(other, View::Effective));
    }
    let mut short = Vec::new();
    if count + 1 > capacity(PODS) {
        let resource = PODS.to_owned();
        short.push(Insufficient { resource, requested: 1, used: count, capacity: capacity(PODS) });
    }
    let wanted = requests(pod, View::WithoutClaimed);
    let first = [CPU, MEMORY, EPHEMERAL_STORAGE];
    let rest = wanted.keys().map(String::as_str).filter(|name| !first.contains(name) && is_counted(name));
    for name in first.into_iter().chain(rest) {
        if is_extended(name) && !allocatable.contains_key(name) {
            continue;
        }
        let of = |list: &Amounts| units(name, amount_of(list, name));
        let found = Insufficient {
            resource: name.to_owned(),
            requested: of(&wanted),
            used: of(&used),
            capacity: capacity(name),
        };
        if found.requested > 0 && found.missing() > 0 {
            short.push(found);
        }
    }
    short
}

/// Whether the resource is a countable node resource beyond the basic ones.
fn is_counted(name: &str) -> bool {
    is_extended(name) || is_hugepage(name) || name.contains("kubernetes.io/") || name.starts_with("attachable-volumes-")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn pod(requests: Value) -> Pod {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "c", "resources": {"requests": requests}}]}});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    fn node(list: Value) -> BTreeMap<String, String> {
        serde_json::from_value(list).expect("texts by name")
    }

    fn short(wanted: Value, used: &[Value], allocatable: Value) -> Vec<(String, i64, i64, i64)> {
        let others: Vec<Pod> = used.iter().map(|u| pod(u.clone())).collect();
        insufficient(&pod(wanted), others.iter(), &node(allocatable))
            .into_iter()
            .map(|s| (s.resource, s.requested, s.used, s.capacity))
            .collect()
    }

    #[test]
    fn what_is_short_is_named_in_order() {
        let four = json!({"pods": "2", "cpu": "4", "memory": "1Gi", "ephemeral-storage": "10Gi",
            "example.com/gpu": "1", "example.com/none": "0"});
        let named = |name: &str, requested, used, capacity| (name.to_owned(), requested, used, capacity);
        for (wanted, used, expected) in [
            (json!({"cpu": "8"}), vec![json!({"cpu": "1"})], vec![named("cpu", 8000, 1000, 4000)]),
            (json!({"cpu": "3"}), vec![json!({"cpu": "1"})], vec![]),
            (json!({}), vec![json!({}), json!({})], vec![named("pods", 1, 2, 2)]),
            // A zero request fits even where the others exceed the capacity.
            (json!({"cpu": "0"}), vec![json!({"cpu": "5"})], vec![]),
            (
                json!({"memory": "2Gi", "ephemeral-storage": "11Gi", "example.com/gpu": "2"}),
                vec![],
                vec![
                    named("memory", 2 << 30, 0, 1 << 30),
                    named("ephemeral-storage", 11 << 30, 0, 10 << 30),
                    named("example.com/gpu", 2, 0, 1),
                ],
            ),
            (json!({"example.com/unlisted": "1"}), vec![], vec![]),
            (json!({"example.com/none": "1"}), vec![], vec![named("example.com/none", 1, 0, 0)]),
            (json!({"hugepages-2Mi": "2Mi"}), vec![], vec![named("hugepages-2Mi", 2 << 20, 0, 0)]),
            (json!({"strange": "1"}), vec![], vec![]),
        ] {
            assert_eq!(short(wanted.clone(), &used, four.clone()), expected, "{wanted}");
        }
    }

    proptest! {
        #[test]
        fn a_pod_fits_exactly_where_the_sum_does(
            wanted in 1_i64..10_000, used in prop::collection::vec(0_i64..10_000, 0..6), capacity in 0_i64..20_000,
        ) {
            let milli = |m: i64| json!({"cpu": format!("{m}m")});
            let others: Vec<Value> = used.iter().map(|m| milli(*m)).collect();
            let found = short(milli(wanted), &others, json!({"pods": "110", "cpu": format!("{capacity}m")}));
            prop_assert_eq!(found.is_empty(), used.iter().sum::<i64>() + wanted <= capacity);
        }
    }
}
