//! Quality of service class of a pod. Pure.

use serde_json::Value;

use super::{
    fields::{fields, list},
    quantities::quantity,
};

/// Returns `Guaranteed`, `Burstable`, or `BestEffort`, from the requests and limits of CPU and memory.
pub fn class(spec: &Value) -> &'static str {
    let containers: Vec<&Value> = match spec.get("resources") {
        Some(of_pod) => vec![of_pod],
        None => {
            list(spec, "/containers").iter().chain(list(spec, "/initContainers")).map(|c| &c["resources"]).collect()
        }
    };
    let counted = |resources: &Value, which: &str| -> Vec<(String, i128)> {
        let known = fields(resources, which).filter(|(name, _)| ["cpu", "memory"].contains(&name.as_str()));
        known.filter_map(|(name, value)| Some((name.clone(), quantity(value)?))).filter(|(_, q)| *q > 0).collect()
    };
    let (mut requests, mut limits) = ([0_i128; 2], [0_i128; 2]);
    let (mut any, mut all_limited) = (false, true);
    for resources in containers {
        for (which, sums) in [("/requests", &mut requests), ("/limits", &mut limits)] {
            let counted = counted(resources, which);
            any |= !counted.is_empty();
            all_limited &= which == "/requests" || counted.len() == 2;
            for (name, quantity) in counted {
                sums[usize::from(name == "memory")] += quantity;
            }
        }
    }
    match () {
        () if !any => "BestEffort",
        () if all_limited && requests == limits => "Guaranteed",
        () => "Burstable",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_class_follows_requests_and_limits() {
        let both = json!({"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "1000m", "memory": "1024Mi"}});
        for (resources, expected) in [
            (vec![json!({})], "BestEffort"),
            (vec![json!({"requests": {"example.com/x": "1"}})], "BestEffort"),
            (vec![json!({"requests": {"cpu": "0"}})], "BestEffort"),
            (vec![both.clone()], "Guaranteed"),
            (vec![both.clone(), json!({})], "Burstable"),
            (vec![json!({"requests": {"cpu": "1"}})], "Burstable"),
        ] {
            let containers: Vec<Value> = resources.into_iter().map(|r| json!({"resources": r})).collect();
            assert_eq!(class(&json!({"containers": containers})), expected);
        }
        assert_eq!(class(&json!({"containers": [{}], "resources": both})), "Guaranteed");
    }
}
