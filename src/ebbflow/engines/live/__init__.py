"""Real replicas on torchft: they meet at a lighthouse, agree on a state and train together while they are there.

    agreement     who may take part, and whose state counts (pure)
    lighthouse    whose heart beats, by the lighthouse's own page
    group         the connections of one circle of replicas; nothing waits for the dead
    member        one replica's place in the fleet: quorum, greeting, connections
    engine        the engine contract on top

torchft gives the lighthouse, the heartbeats and the quorum. What its Manager class would do besides (listen on every
interface, transfer pickled state) is done here, so that a replica listens on one address and executes nothing that a
peer sends.
"""
