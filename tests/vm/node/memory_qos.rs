//! Memory QoS on the kernel: pods, containers, and QoS cgroups in systemd units. Behavior: spec 06a §8.3, §10.2.

use serde_json::json;

use crate::node::inside::{ClusterFixture, UNIT, file, files, property, scope, sized, slice, systemctl, until};

const WAITS: &str = "exec sleep 100000";
const KUBEPODS: &str = "/kubepods.slice";
const BURSTABLE: &str = "/kubepods.slice/kubepods-burstable.slice";
const FILES: [&str; 3] = ["memory.min", "memory.low", "memory.high"];

fn bytes(group: &str, name: &str) -> u64 {
    file(group, name).parse().expect("a number")
}

pub async fn memory_requests_are_protected_by_the_kernel(world: &ClusterFixture) {
    let mut fields = world.port.fields();
    fields["featureGates"] = json!({"MemoryQoS": true});
    fields["memoryReservationPolicy"] = json!("TieredReservation");
    world.configure(&fields);
    systemctl(&["restart", UNIT]);
    let equal = json!({"cpu": "100m", "memory": "32Mi"});
    let burstable = json!({"requests": {"memory": "64Mi"}, "limits": {"memory": "128Mi"}});
    world.run("protected", sized(WAITS, json!({"requests": equal, "limits": equal})));
    world.run("throttled", sized(WAITS, burstable));
    let [protected, throttled] = world.until_ready(["protected", "throttled"]).await;

    // AC-06a-25, AC-06a-26: 127504384 is nine tenths of the way from 64Mi to 128Mi, rounded down to a page.
    let expected = ["memory.min=0", "memory.low=67108864", "memory.high=127504384"];
    assert_eq!(files(&scope(&throttled), &FILES), expected);
    assert_eq!(files(&scope(&protected), &FILES), ["memory.min=33554432", "memory.low=0", "memory.high=max"]);
    assert_eq!(files(&slice(&throttled), &FILES), ["memory.min=0", "memory.low=67108864", "memory.high=max"]);
    assert_eq!(files(&slice(&protected), &FILES), ["memory.min=33554432", "memory.low=0", "memory.high=max"]);
    let unit = scope(&throttled);
    let unit = unit.rsplit('/').next().expect("a name");
    assert_eq!(["MemoryLow", "MemoryHigh"].map(|name| property(unit, name)), ["67108864", "127504384"]);

    // AC-06a-27: other pods may run.
    let (min, low) = (bytes(KUBEPODS, "memory.min"), bytes(BURSTABLE, "memory.low"));
    assert!(low >= 64 << 20 && min - low >= 32 << 20, "{min} {low}");
    world.remove(["protected", "throttled"]).await;
    until("the sums are without the pods", async || {
        let sums = (bytes(KUBEPODS, "memory.min"), bytes(BURSTABLE, "memory.low"));
        (sums == (min - (96 << 20), low - (64 << 20))).then_some(())
    })
    .await;
    world.configure(&world.port.fields());
    systemctl(&["restart", UNIT]);
}
